"""What a model did in use: captured, rated, classed, reviewed, assembled into a dataset."""

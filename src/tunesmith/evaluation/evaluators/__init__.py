"""What is measured: one contract, one registry, our evaluators, and the program that loads a model for them."""

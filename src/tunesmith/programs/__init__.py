"""How the worker runs trainers and evaluators: launch, contain, read events, check results; and the program side."""

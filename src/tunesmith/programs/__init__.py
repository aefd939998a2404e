"""How the worker runs trainers and evaluators: launch, contain, listen, judge; and what the program itself sees."""

"""Pure decisions about training: estimates, memory, live checks, when to save."""

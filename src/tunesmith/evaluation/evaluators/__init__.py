"""What scores: the entry point of the child process, the held-out evaluator, and the scripted one for drills."""

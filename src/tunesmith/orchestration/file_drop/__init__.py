"""File drop: a program that only shares a folder with tunesmith asks for a round and reads what became of it."""

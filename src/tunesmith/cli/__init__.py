"""The command line: one file per noun; each parses, calls the client, and formats."""

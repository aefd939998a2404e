"""The command line: one file per resource; each parses, calls the client, and formats."""

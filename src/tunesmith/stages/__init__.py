"""One verb per file. A stage does its work outside any transaction and returns what happened; it moves no state."""

"""States of runs, tasks and requests, and what may follow what."""

"""What every other package stands on: errors, ids, clock, files, logs, HTTP. Knows nothing of runs, models or data."""

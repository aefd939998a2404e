"""The record of the work: run, task, attempt, lease, request, spec, queue, workers."""

"""What follows what: submit, plan, lifecycle, control, worker."""

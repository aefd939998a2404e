"""What trains: one module per trainer, a registry, and the entry point of the child process."""

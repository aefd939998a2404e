"""Teachers: other models that answer in place of the student."""

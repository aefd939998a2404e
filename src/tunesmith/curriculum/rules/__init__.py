"""Pure decisions about a cycle of the curriculum and its corrections."""

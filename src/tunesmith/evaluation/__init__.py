"""The evaluate stage, its evaluators and the gate."""

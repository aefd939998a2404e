"""The simulated trainer: writes what a trainer would, and fails as told."""

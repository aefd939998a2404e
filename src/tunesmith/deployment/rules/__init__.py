"""Pure decisions about deployment: parity, shadow, forced deployments."""

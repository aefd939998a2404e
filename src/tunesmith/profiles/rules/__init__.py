"""Pure decisions about profiles: campaigns, locked facts, limits of targets."""

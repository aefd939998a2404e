"""The arms of the training benchmark: what every one is given, the native trainer, TRL's, and how figures are shown."""

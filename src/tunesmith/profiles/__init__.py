"""Profiles, project file, environment and overrides, resolved once, with the origin of every key."""

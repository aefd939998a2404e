"""What stories and faults share: worker processes that end with their test, and both databases."""

from story_builders import make_fleet, postgres, store

__all__ = ["make_fleet", "postgres", "store"]

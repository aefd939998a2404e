"""What stories and faults share: worker processes that end with their test, and both databases."""

from databases import postgres
from story_builders import make_fleet, postgres_url, store

__all__ = ["make_fleet", "postgres", "postgres_url", "store"]

"""What stories and faults share: worker processes that end with their test, and both databases."""

from support.databases import postgres
from support.fleet import make_fleet, postgres_url, store

__all__ = ["make_fleet", "postgres", "postgres_url", "store"]

"""What serves an adapter: one contract, one registry."""

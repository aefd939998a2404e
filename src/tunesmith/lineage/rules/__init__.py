"""What lineage decides and draws, without looking at anything."""

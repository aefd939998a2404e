"""Rounds: the runs that a campaign opens by itself. Facts, decision, opening, and what earlier ones have brought."""

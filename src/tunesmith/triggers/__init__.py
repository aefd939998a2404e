"""Triggers: rules that say whether a campaign should open its next round now, each with its value and threshold."""

"""A teacher answers again what the model answered poorly: when, at what cost, and whether its answer is better."""

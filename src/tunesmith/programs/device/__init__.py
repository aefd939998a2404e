"""Who has the device: training asks for it, serving gives it."""

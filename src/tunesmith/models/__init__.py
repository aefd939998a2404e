"""Base models and adapters: what their files say, loading, chat templates, tokens, scores."""

import os

# Read when torch is loaded, so it must be set before. By default a thread that waits for another spins; where the cores
# are shared with anything else, that made a small model five times slower. Whoever sets it knows better.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""From a version that passed the gate to one that answers: parity, flip, reconcile, watch."""

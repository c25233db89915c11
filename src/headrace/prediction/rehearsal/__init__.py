"""Real gradients in virtual time: one process computes what many workers would, in the order that a timeline gives."""

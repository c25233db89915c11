"""Which strategy to take on which machines: every one that fits is simulated, and ranked by time or money."""

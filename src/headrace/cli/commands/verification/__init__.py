"""What proves that a strategy computes what one process does."""

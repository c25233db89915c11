"""What the event files of a run say, as values."""

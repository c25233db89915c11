"""Where examples come from: each file reads one kind of data, behind `Source`."""

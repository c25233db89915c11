"""Values between split blocks are divided along the sequence."""

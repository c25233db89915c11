"""Workers that average their parameters every few rounds."""

"""One training loop a file; a replica names the one that it needs."""

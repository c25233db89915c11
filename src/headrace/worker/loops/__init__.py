"""One training loop a file; what a replica synchronizes by names the one that it needs."""

"""What users' callbacks are told on rank 0, and what they may do to the run."""

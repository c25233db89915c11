"""A training script becomes a job: what its loop does, read from its syntax and from a few of its steps."""

"""A model that is cut into stages, which work on micro-batches: pipeline parallelism."""

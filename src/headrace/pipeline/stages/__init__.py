"""A stage: its modules, buffers, and gradients."""

"""Makes a model without memory for its large tensors, and each of them later by itself, as the constructor made it."""

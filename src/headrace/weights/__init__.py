"""Tensors of safetensors files as a model's first values: what is there, whether it fits, and reading parts of it."""

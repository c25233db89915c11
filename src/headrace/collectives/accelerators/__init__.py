"""What carries the tensors of accelerators: their own backend, or host memory."""

"""What a worker on an accelerator has besides."""

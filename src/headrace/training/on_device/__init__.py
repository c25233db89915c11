"""What a step decides on an accelerator, without a wait of the host."""

"""A trained model as a file for phones: ExecuTorch, with XNNPACK."""

"""How batches are read while the model trains."""

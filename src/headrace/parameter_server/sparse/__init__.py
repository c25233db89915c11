"""Tables of embeddings on parameter servers: only rows of a batch travel."""

"""Files that a person writes, of a cluster and of a model: what loads none imports nothing of them."""

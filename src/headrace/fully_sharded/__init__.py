"""torch's `fully_shard` (FSDP2) among the workers of a run: its units, what moves them, and a worker's part of them."""

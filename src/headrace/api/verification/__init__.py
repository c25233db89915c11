"""verify: a job's first rounds under a strategy beside a plain PyTorch loop, compared number by number."""

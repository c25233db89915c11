"""One sequence on several devices: its tokens are divided, and attention goes around a ring."""

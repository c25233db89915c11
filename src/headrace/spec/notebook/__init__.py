"""What a notebook shows of frozen values."""

"""What one worker process does: its training loop, evaluation, saving, and events."""

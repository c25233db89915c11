"""Commands on what a run has saved: its checkpoints, and the trained model."""

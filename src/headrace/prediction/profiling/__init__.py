"""What a training step of a model takes on this machine, and what such a profile belongs to."""

"""What a process of a script is given of a batch, and which part of it that is."""

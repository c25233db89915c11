"""What of the user's code takes part in a step: the loss, and what a loop may read and change between two verbs."""

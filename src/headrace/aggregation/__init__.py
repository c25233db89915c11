"""How the gradients of workers in lock-step become one: sums of what was compressed, votes, robust means."""

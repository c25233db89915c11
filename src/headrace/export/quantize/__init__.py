"""Weights and activations of an exported model in 8 bits, or in half precision, and what that costs."""

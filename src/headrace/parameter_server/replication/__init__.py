"""A server and its backup."""

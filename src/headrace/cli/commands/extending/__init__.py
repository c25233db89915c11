"""Begins what extends headrace."""

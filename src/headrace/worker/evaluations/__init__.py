"""Evaluations over the whole evaluation set, and what follows from them."""

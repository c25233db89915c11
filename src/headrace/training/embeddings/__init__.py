"""Embedding tables whose rows are made, trained and moved one by one."""

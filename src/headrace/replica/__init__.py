"""A model copy with its three verbs: compute, synchronize, update. What strategies are put together from."""

__all__: list[str] = []

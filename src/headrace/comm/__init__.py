"""HOW BYTES MOVE: shared memory on one host, torch.distributed between devices and hosts."""

__all__: list[str] = []

"""Parameter servers: shards, and the workers that push to them and pull from them. Usable alone; see README.md."""

from __future__ import annotations

__all__: list[str] = []

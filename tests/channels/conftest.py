"""Ranks as processes, as the collectives' tests have them."""

from __future__ import annotations

from collectives.conftest import fork_server, play

__all__ = ["fork_server", "play"]

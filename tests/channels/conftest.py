"""Ranks as processes, as the collectives' tests have them."""

from __future__ import annotations

from collectives.conftest import nursery, play

__all__ = ["nursery", "play"]

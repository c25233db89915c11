"""The engine of the engines' own tests."""

from __future__ import annotations

from engine.conftest import _quiet, engine

__all__ = ["_quiet", "engine"]

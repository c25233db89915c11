"""Copies of the books of the random histories, and their states."""

from __future__ import annotations

from typing import Any

from headrace.parameter_server.core.shard import ShardState
from model_checking.explorer import copied, frozen

__all__ = ["copied_book", "noted", "shard_key"]


def copied_book(book: Any) -> Any:
    """Returns a copy of a book and its machine, with the same world."""
    made = object.__new__(type(book))
    made.__dict__.update(
        {name: own if name in ("world", "history") else copied(own) for name, own in vars(book).items()}
    )
    return made


def noted(book: Any) -> Any:
    """Returns what a book has noted, without its machine's state."""
    return frozen([own for name, own in vars(book).items() if name not in ("world", "history", "machine")])


def shard_key(state: ShardState) -> Any:
    """Returns a shard's state; in which order its members have asked makes no difference to it."""
    told = sorted(state.told, key=lambda each: each.push.worker)
    asked = [sorted(each, key=lambda event: event.worker) for each in (state.contributed, state.waiting)]
    return frozen((state.version, state.ahead, state.done, state.overdue, sorted(state.members), told, asked))

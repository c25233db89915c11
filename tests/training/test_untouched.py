"""What a trial changes in a user's objects is put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.training.user_code.untouched import untouched


class Locked:
    """Its slots cannot be set again, as those of a conversion of the transformers library."""

    __slots__ = ("counts", "name")
    counts: list[int]
    name: str

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).__slots__ and getattr(self, name, None) is not None:
            raise ValueError(name)
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Frozen:
    counts: list[int]


def test_slots_that_cannot_be_set_are_put_back() -> None:
    locked, frozen = Locked(), Frozen([1])
    locked.counts, locked.name = [1], "first"
    with untouched(locked, frozen):
        locked.counts.append(2)
        object.__setattr__(locked, "name", "second")
        frozen.counts.append(2)
    assert (locked.counts, locked.name, frozen.counts) == ([1], "first", [1])

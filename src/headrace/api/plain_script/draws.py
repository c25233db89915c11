"""Random numbers: a stream that all processes of a script draw alike, and one that each process has for itself.

before setup   all processes draw the same, where the script seeds them alike: weights, data that is made up
after setup    common   what samplers draw, so that all have one order: that of the script alone
               private  dropout, noise, actions, augmentation, reading processes: of a seed for each rank
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.collectives.base import ProcessGroup, gather_texts


class CommonDraws:
    """The states of torch's, numpy's and Python's generators that are common to all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._is_drawing = False
        texts = self._gather()
        # Where a script does not seed a generator, the order is as good as rank 0's.
        self._common = [_from_text(kind, text) for kind, text in enumerate(texts[0])]
        self._part(texts)

    def agree(self) -> None:
        """Takes over generators that the script has seeded anew, alike on all ranks; all ranks call it together."""
        if self._is_drawing:
            return
        own = torch.tensor([zlib.crc32(_text(state).encode()) for state in _states()])
        # Most often each rank draws its own, and there is nothing to take over.
        if (self._group.gather(own.view(torch.uint8)).view(torch.int64) != own).any(0).all():
            return
        texts = self._gather()
        for kind in self._part(texts):
            self._common[kind] = _from_text(kind, texts[0][kind])

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Lets what runs inside draw from the common stream."""
        if self._is_drawing:
            yield
            return
        private = _states()
        _set_states(self._common)
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            self._common = _states()
            _set_states(private)

    def reader_seed(self, common: int) -> int:
        """Returns the seed of this rank's reading processes for a number that all ranks have drawn."""
        return int(np.random.SeedSequence([common, self._group.rank]).generate_state(1, np.uint64)[0] >> 1)

    def _gather(self) -> list[list[str]]:
        return [json.loads(text) for text in gather_texts(self._group, json.dumps(list(map(_text, _states()))))]

    def _part(self, texts: Sequence[Sequence[str]]) -> list[int]:
        """Seeds those generators for this rank alone whose states are equal on all ranks; returns which."""
        equal = [kind for kind, of_ranks in enumerate(zip(*texts, strict=True)) if len(set(of_ranks)) == 1]
        for kind in equal:
            entropy = int.from_bytes(hashlib.sha256(texts[0][kind].encode()).digest(), "big")
            sequence = np.random.SeedSequence(entropy, spawn_key=(self._group.rank, kind))
            words = np.asarray(sequence.generate_state(8), dtype=np.uint32)
            _SEEDERS[kind](words)
        return equal


def _number(words: NDArray[np.uint32]) -> int:
    return int(words[:2].view(np.uint64)[0] >> 1)


_SEEDERS: Sequence[Callable[[NDArray[np.uint32]], object]] = (
    lambda words: torch.manual_seed(_number(words)),
    np.random.seed,
    lambda words: random.seed(_number(words)),
)
"""What seeds each generator, in the order of `_states`."""


def _states() -> list[Any]:
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def _set_states(states: Sequence[Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _text(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy()).hex()
    return json.dumps(state, default=np.ndarray.tolist)


def _from_text(kind: int, text: str) -> Any:
    if kind == 0:
        return torch.tensor(bytearray.fromhex(text), dtype=torch.uint8)
    state = json.loads(text)
    return tuple(tuple(part) if isinstance(part, list) else part for part in state)

"""An epoch's order, its rounds, and an example's random numbers: functions of (seed, epoch) and (seed, epoch, index).

Both are addresses in one counter-based generator (Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): the seed is the key, the epoch and the example's index are words of the counter. So nothing is stored or replayed
to begin anywhere, and the number of workers cannot matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError

_ORDER = 0
_EXAMPLES = 1
_SCATTER = 2
_WORD = 2**64
_SORTED = 1 << 20
"""Most examples whose order is sorted as a whole: it takes 60 ms, and is the fastest to read."""
_BLOCK = 1 << 15
_ROUNDS = 6


class ExampleOrder:
    """The order in which an epoch visits the examples.

    It is a permutation: of few examples stored as a whole, of many computed place by place, so that beginning in the
    middle of an epoch of any length takes no time and no memory.
    """

    def __init__(self, count: int, seed: int, epoch: int, shuffled: bool = True) -> None:
        self._count = count
        self._whole: NDArray[np.int64] | None = None
        self._scatter: _Scatter | None = None
        if shuffled and count <= _SORTED:
            self._whole = permutation(count, seed, epoch)
        elif shuffled:
            self._scatter = _Scatter(count, seed, epoch)
        self._block = (-1, np.empty(0, dtype=np.int64))

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the indices at the places from `start` to before `stop`, `(stop - start,)`."""
        if self._whole is not None:
            return self._whole[start:stop]
        if self._scatter is None:
            return np.arange(start, stop)
        pieces = []
        while start < stop:
            first = start - start % _BLOCK
            held, block = self._block
            if first != held:
                block = self._scatter(np.arange(first, min(first + _BLOCK, self._count)))
                # Both at once, for other threads.
                self._block = (first, block)
            end = min(stop, first + _BLOCK)
            pieces.append(block[start - first : end - first])
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, dtype=np.int64)])

    def at(self, place: int) -> int:
        """Returns the index at one place."""
        if self._scatter is not None:
            return int(self._scatter(np.array([place]))[0])
        return int(self.slice(place, place + 1)[0])


class _Scatter:
    """A permutation of `0 .. count - 1` that is computed place by place.

    Multiplications by odd numbers, additions and shifts, each invertible within the bits of `count` and keyed by the
    seed and the epoch; a result of `count` or more goes round again (cycle walking; Black, Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 3).
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        bits = max(2, (count - 1).bit_length())
        words = _philox(seed, _SCATTER, (0, 0, epoch, 0)).random_raw(2 * _ROUNDS)
        self._count = np.uint64(count)
        self._mask = np.uint64((1 << bits) - 1)
        # A bit more than half, so that every bit reaches every other within a few rounds.
        self._shift = np.uint64(bits // 2 + 1)
        self._factors = (words[:_ROUNDS] | np.uint64(1)) & self._mask
        self._terms = words[_ROUNDS:] & self._mask

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = self._mix(places.astype(np.uint64))
        outside = np.flatnonzero(mixed >= self._count)
        while len(outside):
            mixed[outside] = self._mix(mixed[outside])
            outside = outside[mixed[outside] >= self._count]
        return mixed.view(np.int64)

    def _mix(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor, term in zip(self._factors, self._terms, strict=True):
            words = (words * factor + term) & self._mask
            words ^= words >> self._shift
        return words


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices `0 .. count - 1` in random order, `(count,)`."""
    # Sorted raw words instead of Generator.permutation: numpy promises the bits of the former for all
    # versions and machines, not those of the latter, and a run may be resumed elsewhere. Each word carries its
    # own index in its low bits, which costs half of an argsort and leaves no ties.
    low = np.uint64((1 << (count - 1).bit_length()) - 1)
    words = np.asarray(_philox(seed, _ORDER, (0, 0, epoch, 0)).random_raw(count))
    words &= ~low
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    words &= low
    return words.view(np.int64)


def generator(seed: int, epoch: int, index: int, transform: int = 0) -> np.random.Generator:
    """Returns the random generator of one example in one epoch; `transform` tells a pipeline's transforms apart."""
    return np.random.Generator(_philox(seed, _EXAMPLES, (0, transform, epoch, index)))


def derived(*numbers: int) -> int:
    """Returns a seed of 64 bits for what numbers name: rank, epoch, process; sums of them would come twice."""
    # With their number: numpy takes zeros at the end for none.
    return int(np.random.SeedSequence((len(numbers), *numbers)).generate_state(1, np.uint64)[0])


def _philox(seed: int, stream: int, counter: tuple[int, int, int, int]) -> np.random.Philox:
    key = np.array((seed % _WORD, stream), dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64))


_STREAM = 2**32
"""Above every index that a transform draws numbers for."""


class Bucketed:
    """An order that brings examples of about one length together.

    Within a window of batches, examples are sorted by length, and the batches of the window shuffled:

        order       3 9 1 4 | 1 5 9 2 | 6 5 3 5 | 8 9 7 9      lengths, a window of 4 batches
        sorted      1 1 2 3 | 3 4 5 5 | 5 6 7 8 | 9 9 9 9
        shuffled    5 6 7 8 | 1 1 2 3 | 9 9 9 9 | 3 4 5 5

    `lengths` are of each place of the data, `window` is in batches.
    """

    def __init__(
        self,
        order: ExampleOrder,
        count: int,
        lengths: NDArray[np.int64],
        batch: int,
        window: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._order = order
        self._count = count
        self._lengths = lengths
        self._batch = batch
        self._size = batch * window
        self._seed = seed
        self._epoch = epoch
        self._which = -1
        self._sorted = np.empty(0, dtype=np.int64)

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the indices at the places from `start` to before `stop`, `(stop - start,)`."""
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            which, offset = divmod(start, self._size)
            self._load(which)
            end = min(stop - start, self._size - offset)
            pieces.append(self._sorted[offset : offset + end])
            start += end
        return np.concatenate(pieces)

    def _load(self, which: int) -> None:
        if which == self._which:
            return
        first = which * self._size
        places = self._order.slice(first, min(first + self._size, self._count))
        places = places[np.argsort(self._lengths[places], kind="stable")]
        # The short batch of an epoch stays the last.
        whole = len(places) // self._batch * self._batch
        rows = places[:whole].reshape(-1, self._batch)
        # By raw words, since numpy keeps their bits in all versions.
        words = generator(self._seed, self._epoch, _STREAM + which).bit_generator.random_raw(len(rows))
        turn = np.argsort(words, kind="stable")
        self._which, self._sorted = which, np.concatenate([rows[turn].reshape(-1), places[whole:]])


@dataclass(frozen=True)
class Hosts:
    """Hosts that each list examples of their own.

    Attributes:
        counts: of examples, by host; () before they have told each other.
        mine: which one this is.

    Examples:
        >>> hr.data.Hosts(counts=(100, 120), mine=1).counts[1]
        120
    """

    counts: tuple[int, ...] = ()
    mine: int = 0


def visits(examples: int, batch: int, drop_last: bool) -> int:
    """Returns how many examples an epoch visits.

    Raises:
        DataError: none, as all together are fewer than a batch.
    """
    if drop_last and examples < batch:
        raise DataError(
            f"drop_last=True leaves out all {examples:,} examples, as a batch has {batch:,}; use a smaller "
            "global_batch_size, or leave drop_last out"
        )
    return examples // batch * batch if drop_last else examples


@dataclass(frozen=True)
class Rounds:
    """The rounds of one epoch.

    A host with `n` of all `N` examples takes those at `[n i // R, n (i + 1) // R)` of its order in round `i` of
    `R = ceil(N / B)`; if all hosts list the same data, those at `[i B, (i + 1) B)`. `examples` are those that this host
    lists, `batch` those that all workers take in a round (on average, if hosts differ). With `drop_last`, the last
    examples of the order that make no whole batch are in no round.
    """

    examples: int
    hosts: Hosts | None
    batch: int
    drop_last: bool = False

    def __len__(self) -> int:
        return -(-self.total // self.batch)

    @property
    def total(self) -> int:
        """Examples of all hosts together."""
        return visits(self._listed, self.batch, self.drop_last)

    @property
    def _listed(self) -> int:
        return sum(self.hosts.counts) if self.hosts and self.hosts.counts else self.examples

    @property
    def own(self) -> int:
        """Examples that this host visits."""
        hosts = self.hosts
        if hosts is None or len(hosts.counts) <= 1:
            return self.total
        return hosts.counts[hosts.mine] * self.total // self._listed

    def span(self, index: int) -> tuple[int, int, int]:
        """Returns this host's examples of a round, `[start, stop)` of its order, and how many all hosts take."""
        hosts = self.hosts
        if hosts is None or len(hosts.counts) <= 1:
            start = index * self.batch
            stop = min(start + self.batch, self.total)
            return start, stop, stop - start
        total, rounds = self.total, len(self)
        counts = [count * total // self._listed for count in hosts.counts]
        spans = [(count * index // rounds, count * (index + 1) // rounds) for count in counts]
        return *spans[hosts.mine], sum(stop - start for start, stop in spans)

"""Examples that belong to clients: each worker trains on those of one client at a time, as in federated learning.

rounds     | 0 1 2 3 | 4 5 6 7 | 8 9 ..       `rounds` = 4 between two draws of clients
worker 0   | client 7| client 2| client 5
worker 1   | client 3| client 7| client 0     as many clients take part as there are workers
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.order import derived, permutation
from headrace.data.pipeline.source import require_whole
from headrace.errors import DataError, UsageError
from headrace.policies.roles import bounds


class ClientOrder:
    """The order of an epoch in which each worker has one client's examples, in an order that is drawn with the client.

    `members` are the places of each client's examples, `rounds` how many rounds a client takes part in, `shares` the
    relative shares of the workers, `total` and `batch` the examples of an epoch and of a round.
    """

    def __init__(
        self,
        members: Sequence[NDArray[np.int64]],
        rounds: int,
        shares: Sequence[int],
        total: int,
        batch: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._members, self._rounds, self._seed = members, rounds, seed
        self._total, self._batch = total, batch
        self._per_epoch = -(-total // batch)
        self._first = epoch * self._per_epoch
        self._bounds = functools.cache(lambda count: bounds(count, shares))

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the places of the examples at `[start, stop)` of the order, `(stop - start,)`."""
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            round_, begin = divmod(start, self._batch)
            end = min(self._batch, begin + stop - start)
            for worker, (low, high) in enumerate(self._of(self._first + round_)):
                low, high, since = max(low, begin), min(high, end), low
                if low < high:
                    pieces.append(self._taken(worker, self._first + round_, low - since, high - since))
            start += end - begin
        return np.concatenate(pieces)

    def _of(self, round_: int) -> Sequence[tuple[int, int]]:
        """Returns which examples of a round of the run are each worker's."""
        return self._bounds(min(self._batch, self._total - round_ % self._per_epoch * self._batch))

    def _taken(self, worker: int, round_: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns a part of the examples that a worker has in a round of the run."""
        stretch = round_ // self._rounds
        drawn = int(permutation(len(self._members), derived(self._seed, stretch), 0)[worker])
        members, client = self._members[drawn], derived(self._seed, stretch, drawn)
        spans = (self._of(earlier)[worker] for earlier in range(stretch * self._rounds, round_))
        since = sum(high - low for low, high in spans)
        # The client's own epochs, one after the other, each in another order.
        epochs, within = np.divmod(np.arange(since + start, since + stop), len(members))
        orders = {epoch: permutation(len(members), client, epoch) for epoch in np.unique(epochs).tolist()}
        places = [orders[epoch][place] for epoch, place in zip(epochs.tolist(), within.tolist(), strict=True)]
        taken: NDArray[np.int64] = members[np.array(places)]
        return taken


@dataclass(frozen=True, eq=False)
class Clients:
    """Whose each example is.

    Attributes:
        ids: the client of each example of the source, `(examples,)` int64.
        rounds: how many a client takes part in when it is drawn.
    """

    ids: NDArray[np.int64]
    rounds: int

    def order(
        self, visits: NDArray[np.int64], shares: Sequence[int], total: int, batch: int, seed: int, epoch: int
    ) -> ClientOrder:
        """Returns the order of an epoch for workers with such shares, as of `ClientOrder`.

        `visits` are the indices of the source's examples, by place in the data.
        """
        ids = self.ids[visits]
        members = [np.flatnonzero(ids == client) for client in np.unique(ids)]
        if len(members) < len(shares):
            raise UsageError(
                f"{len(shares)} workers train on one client each, and {len(members)} clients have examples; use fewer "
                "workers, or more clients"
            )
        return ClientOrder(members, self.rounds, shares, total, batch, seed, epoch)


def dirichlet(labels: Any, clients: int, alpha: float, seed: int = 0) -> NDArray[np.int64]:
    """Divides examples among clients who have more of some classes (Hsu et al., 2019, in the form of Li et al., 2022).

    Args:
        labels: the class of each example, `(examples,)`.
        clients: how many; with a small `alpha` some may get no example.
        alpha: of the Dirichlet distribution from which the clients' parts of each class are drawn: 0.1 gives a client
            few classes, 100 nearly equal parts of all.
        seed: of the draws.

    Returns:
        The client of each example, `(examples,)` int64.

    Raises:
        DataError: there are no examples.
        UsageError: a number is out of range.

    Examples:
        >>> len(hr.data.dirichlet(torch.arange(100) % 10, clients=5, alpha=0.5))
        100
    """
    require_whole("clients must be", clients)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise UsageError(f"alpha must be a number above 0, got {alpha!r}")
    every = np.asarray(labels)
    if every.ndim != 1 or not len(every):
        raise DataError(f"labels must be (examples,), one class for each example, got shape {every.shape}")
    draws = np.random.default_rng(seed)
    ids = np.zeros(len(every), dtype=np.int64)
    for label in np.unique(every):
        places = draws.permutation(np.flatnonzero(every == label))
        parts = draws.dirichlet([alpha] * clients)
        cuts = np.round(np.cumsum(parts)[:-1] * len(places)).astype(int)
        for client, own in enumerate(np.split(places, cuts)):
            ids[own] = client
    return ids

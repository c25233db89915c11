"""Which lost ranks can be started again: Ray has restarted their agents, and a process serves the run's store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

_AGAIN_S = 1.0


class RankReturns:
    """Waits for what lost ranks need to be started again.

    The store by which a process joins is rank 0's. Where that is lost and the others go on, the rank that leads them
    serves one of its own, and its process tells the address.
    """

    def __init__(self, agents: Sequence[Any]) -> None:
        self._agents = agents
        self._asked: dict[Any, tuple[int, float]] = {}
        self._described: dict[int, Mapping[str, Any]] = {}
        self._leader: int | None = 0
        self._store = ""

    def wanted(self) -> set[int]:
        """Returns the ranks that are waited for."""
        return {rank for rank, _ in self._asked.values()} | self._described.keys()

    def want(self, rank: int) -> None:
        """Begins to wait for a rank's agent: Ray restarts it, perhaps on another node, if the cluster has room."""
        self._asked[self._agents[rank].describe.remote()] = rank, monotonic()

    def lose(self, rank: int) -> None:
        """Takes notice that the process of a rank is lost; without the one that serves the store none can join."""
        if rank == self._leader:
            self._leader = None

    def lead(self, rank: int, store: str) -> None:
        """Takes notice that a rank serves the store."""
        self._leader, self._store = rank, store

    def ready(self) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        """Yields a rank that can be started now, its node's description, and the store's address; "" for rank 0's."""
        import ray

        for reference in ray.wait(list(self._asked), timeout=0)[0] if self._asked else ():
            rank, asked = self._asked[reference]
            try:
                self._described[rank] = ray.get(reference)
            except ray.exceptions.RayError:
                # Ray has not noticed yet that the node is gone, or does not restart the agent yet.
                if monotonic() - asked > _AGAIN_S:
                    del self._asked[reference]
                    self.want(rank)
                continue
            del self._asked[reference]
        while self._described and self._leader is not None:
            rank, described = self._described.popitem()
            yield rank, described, self._store

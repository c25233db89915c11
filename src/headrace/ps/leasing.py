"""A worker's portions of the data, leased from the first server."""

from __future__ import annotations

from headrace.ps.client import Client
from headrace.ps.messages import Kind, Message
from headrace.replica.portions import Fence, Portion, Portions

__all__ = ["LeasedPortions"]


class LeasedPortions(Portions):
    """Args:
    client: of this worker.
    servers: how many there are.
    parts: portions of a round.

    Attributes:
        lease: the one that is held, or has just been pushed; -1 for none.
        late: whether its push was refused because it came too late, so that others have to do it.
        weight, share: what its gradient is worth.
    """

    def __init__(self, client: Client, servers: int, parts: int) -> None:
        self.lease = -1
        self.late = False
        self.weight, self.share = 0.0, 0.0
        self._client = client
        self._servers = servers
        self._parts = parts

    def ask(self) -> None:
        self._client.tell(Message(Kind.ASK, flag=self.late, lease=self.lease))
        self.lease, self.late = -1, False

    def next(self) -> Portion | Fence:
        answer = self._client.lease()
        if answer.kind == Kind.FENCE:
            return Fence(answer.numbers[0])
        self.lease = answer.lease
        round_, part = answer.numbers
        return Portion(round_, part, self._parts)

    def weigh(self, weight: float, share: float) -> None:
        self.weight, self.share = weight, share

    def halt(self) -> None:
        self._client.tell(Message(Kind.HALT))

    def advance(self, done: int, until: int) -> None:
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.SETTLE, lease=done))
        self._client.tell(Message(Kind.ADVANCE, lease=until))

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self._client.moved_bytes

    def renew(self) -> None:
        self._client.pull()

    def end(self) -> None:
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.END))

    def close(self) -> None:
        self._client.close()

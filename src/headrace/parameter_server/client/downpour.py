"""What goes on while a worker computes: one thing at a time, in a thread with links of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.gradients import ReplicaGroup


class Background:
    """Args:
    name: of the thread.
    client: used by that thread alone.

    Attributes:
        client: see there.
    """

    def __init__(self, name: str, client: Client) -> None:
        self.client = client
        self._name = f"headrace-{name}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Does something; waits for what was begun before."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Returns when nothing is going on any more: whether anything was; raises what went wrong."""
        begun = self._join()
        self.check()
        return begun

    def done(self) -> bool:
        """Whether what was begun has just come to its end; it says so once, and raises what went wrong."""
        return self._thread is not None and not self._thread.is_alive() and self.wait()

    def check(self) -> None:
        """Raises what went wrong, if anything did; for whoever waits for what would never come then."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the thread, and ends the links; an error of the thread is the end's, not its cause."""
        self._join()
        self.client.close()

    def _join(self) -> bool:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None


class ServerLinks:
    """A worker's clients: one for all, or one for each of its threads.

    Args:
        main: asks for data, and does what is done where all workers meet.
        places: of its copies.
        fetch_every: steps between two fetches, counted from wherever all met.
        agreement: of this worker's replica: what is fetched comes in on all its ranks at once.
        pushing, fetching: what pushes and fetches in the background; None where `main` does both.
        fetched: the places of what is fetched in the background.

    Attributes:
        main, pushing: see there.
        versions: of the parameters that this worker goes on from, by server and shard.
    """

    def __init__(
        self,
        main: Client,
        places: Sequence[Sequence[Tensor]],
        fetch_every: int,
        replica_group: ReplicaGroup,
        pushing: Background | None = None,
        fetching: Background | None = None,
        fetched: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.main = main
        self.pushing = pushing
        self.versions = main.versions
        self._fetch_every = fetch_every
        self._replica_group = replica_group
        self._since, self._ready = 0, False
        self._fetching = fetching
        self._places, self._fetched = ([place for own in each for place in own] for each in (places, fetched))

    def pull(self) -> None:
        """Brings the parameters up to date now."""
        # Local steps have moved them since.
        self.main.forget()
        self.main.pull()
        self.versions = self.main.versions
        self._since = 0

    def step(self) -> None:
        """Brings the parameters up to date if that is due; in the background, where those fetched before come in now.

        Whoever fetches slowly is waited for when the next fetch is due, or nothing fetched would ever come in.
        """
        self._since += 1
        due = self._since == self._fetch_every
        if self._fetching is None:
            if due:
                self.pull()
            return
        self._ready |= self._fetching.wait() if due else self._fetching.done()
        if self._replica_group.all(self._ready):
            self._ready = False
            if self._places:
                torch._foreach_copy_(self._places, self._fetched)
            self.versions = self._fetching.client.versions
            self.main.pulled()
        if due:
            self._since = 0
            self._fetching.start(self._fetching.client.pull)

    def renew(self) -> None:
        """Lets what goes on in the background come to its end, and brings the parameters up to date."""
        for background in self._backgrounds():
            background.wait()
        self._ready = False
        self.pull()

    def resume(self) -> None:
        """Goes on from what was fetched."""

    @property
    def moved_bytes(self) -> int:
        """Payload of what goes on in the background."""
        return sum(background.client.moved_bytes for background in self._backgrounds())

    def close(self) -> None:
        """Ends what goes on in the background."""
        for background in self._backgrounds():
            background.close()

    def _backgrounds(self) -> list[Background]:
        return [each for each in (self.pushing, self._fetching) if each is not None]

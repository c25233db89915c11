"""How a process takes the place of one that was lost: it asks the rank that serves the store, which answers."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from headrace.engine.torchrun.key_value import StoreClient
from headrace.errors import RunFailed
from headrace.machine.identity import host_name


def come_back(
    store: StoreClient, prefix: str, rank: int, within_s: float, wait: Callable[[], object]
) -> tuple[int, float]:
    """Asks to take the place of a lost process; returns this one's incarnation, and the run's age in seconds.

    `prefix` is that of the group's keys; `wait` is called between two looks. Raises RunFailed where the place is taken,
    or the run is over.
    """
    own, give_up, incarnation = f"{prefix}/back/{rank}", monotonic() + within_s, 0
    why = "its process lives, or the run is over"
    try:
        place = f"{own}/{store.add(own, 1)}"
        while not (incarnation := store.add(place, 0)) and monotonic() < give_up:
            wait()
        if incarnation > 0:
            return incarnation, float(store.get(f"{place}/passed"))
    except ConnectionError as error:
        why = f"the run is over ({error})"
    if incarnation < 0:
        why = "the run comes to its end, or it is no worker's rank"
    raise RunFailed(
        f"another process has begun as rank {rank} before, and this one on {host_name()} cannot take its "
        f"place: {why}; start one process for each rank"
    )


def admit(store: StoreClient, prefix: str, rank: int, incarnation: int, passed_s: float) -> bool:
    """Answers a process that asks to come back, if there is one: as which incarnation, 0 for none; returns whether."""
    own = f"{prefix}/back/{rank}"
    place = f"{own}/{store.add(own, 0)}"
    if place.endswith("/0") or store.add(place, 0):
        return False
    store.set(f"{place}/passed", str(passed_s).encode())
    store.add(place, incarnation or -1)
    return True

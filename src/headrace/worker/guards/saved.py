"""What a strategy saves is what a resumed run can read: what would be lost in silence is refused at the first save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece, state_stores
from headrace.training.synchronization import PeriodicSync
from headrace.training.update import OURS


def declared(replica: Replica, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
    """Yields pieces that are to be saved, and refuses those that a resumed run would lose.

    Raises:
        UsageError: a key is neither the optimizer's nor one of `state_keys`, or is both, or two pieces have one name.
    """
    sync = replica.sync if isinstance(replica.sync, PeriodicSync) else None
    own = {*replica.exchange.state_keys, *(sync.state_keys if sync else ())}
    updater = replica.exchange.updater
    stores = state_stores(updater.optimizer) if updater else ()
    known = {f"{prefix}{key}" for prefix, store in stores for state in store.values() for key in state}
    names: set[str] = set()
    what = type(sync or replica.exchange).__name__
    for key in sorted(own):
        if key in known or not key or set(key) & set("/~"):
            why = "is a key of the optimizer's state, which would not get it back"
            why = why if key in known else "is empty, or has / or ~"
            raise UsageError(f"{what} has the key {key!r} in state_keys, and that {why}; give it another name")
    for piece in pieces:
        key = piece.key.partition("~")[0]
        if updater and not key.startswith(OURS) and key not in known | own:
            raise UsageError(
                f"{what} saves {key!r} of {piece.parameter!r}, which is neither a key of the optimizer's state "
                f"({', '.join(sorted(known)) or 'it has none'}) nor declared; say state_keys = ({key!r},) in "
                f"{what}, and read these pieces in its load()"
            )
        # Each shard of a parameter on a server says for itself what belongs to the parameter as a whole, as its steps.
        if piece.name in names and (updater or piece.start >= 0):
            raise UsageError(
                f"{what} saves {piece.name!r} twice, of which a checkpoint holds one; give the second, which may "
                "have a name of the optimizer's, a key of its own in state_keys"
            )
        names.add(piece.name)
        yield piece


def settings_of(replica: Replica) -> dict[str, Any]:
    """Returns what a run saves beside tensors.

    Raises:
        UsageError: the optimizer's part of it has been left out, or written over.
    """
    exchange = replica.exchange
    settings: Any = exchange.settings()
    what = type(replica.sync if isinstance(replica.sync, PeriodicSync) else exchange).__name__
    if not isinstance(settings, Mapping):
        raise UsageError(f"settings() of {what} returns {settings!r:.60}, and must return a dict of JSON values")
    for name, value in (exchange.updater.settings() if exchange.updater else {}).items():
        if name not in settings or settings[name] != value:
            raise UsageError(
                f"settings() of {what} has left out or changed {name!r}, which the optimizer needs in a resumed run; "
                "return {**super().settings(), ...} of an exchange, and other names of what synchronizes"
            )
    return dict(settings)

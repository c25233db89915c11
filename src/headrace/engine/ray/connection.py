"""Connects this process to a Ray cluster, and says in one line why it cannot."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.errors import UnfitMachine, UsageError
from headrace.machine.extras import remedy

_AUTO = ("auto", "ray://auto")
_ANSWER_S = 5.0
_CLIENT_PORT = 10001


def connect(address: str, runtime_env: Mapping[str, Any] | None, connection: ExitStack) -> Mapping[str, Any] | None:
    """Connects this process, if it is not connected; `connection` gets what ends it.

    Returns the runtime environment that each actor still has to be given; None where all have it.

    Raises:
        UnfitMachine: Ray is not installed, there is no cluster at the address, or it has another version of Ray or
            Python.
        UsageError: Ray does not take the runtime environment.
    """
    try:
        import ray
    except ImportError as error:
        raise UnfitMachine(f"the Ray engine needs ray ({error}): {remedy('ray')}") from error
    _require_known(runtime_env or {})
    if ray.is_initialized():
        return runtime_env
    # As Ray itself does.
    named = os.environ.get("RAY_ADDRESS", "auto") if address in _AUTO else address
    _require_listener(named)
    # Ray replaces it, and a run has one of its own.
    terminates = signal.getsignal(signal.SIGTERM)
    try:
        with naming_runtime_env(runtime_env), warnings.catch_warnings():
            # What it warns of is an error, too, which says it.
            warnings.filterwarnings("ignore", message="Ray Client connection timed out", category=UserWarning)
            ray.init(
                "auto" if address in _AUTO else address,
                runtime_env=dict(runtime_env) if runtime_env else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, TimeoutError) as error:
        raise _no_cluster(named, str(error).strip().partition("\n")[0]) from error
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise UnfitMachine(
            f"the Ray cluster at {named} has another version of Ray or Python than this process: "
            f"{' '.join(str(error).split())}; install the same on both"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminates)
    connection.callback(ray.shutdown)
    return None


def answers(asked: Any, within_s: float) -> Any:
    """Returns what one or several actors answer; raises UnfitMachine where one does not, or is lost."""
    import ray

    try:
        return ray.get(asked, timeout=within_s)
    except ray.exceptions.RayError as error:
        why = (str(error).strip().splitlines() or [f"nothing came within {within_s:g} s"])[-1]
        raise UnfitMachine(
            f"an actor of the run has not answered: {why}; `ray list actors` and the dashboard say which nodes and "
            "actors are lost"
        ) from error


@contextmanager
def naming_runtime_env(runtime_env: Mapping[str, Any] | None) -> Iterator[None]:
    """Makes a UsageError of what Ray says of a runtime environment that it does not take."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not runtime_env:
            raise
        raise UsageError(f"Ray does not take the runtime environment {dict(runtime_env)}: {error}") from error


def _require_known(runtime_env: Mapping[str, Any]) -> None:
    """Raises UsageError for a field that Ray does not know, and would leave out without a word."""
    from ray.runtime_env import RuntimeEnv

    unknown = [name for name in runtime_env if name not in RuntimeEnv.known_fields]
    if unknown:
        known = ", ".join(sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_")))
        raise UsageError(f"a runtime environment has no field {unknown[0]!r}; it has {known}")


def _require_listener(address: str) -> None:
    """Raises UnfitMachine where no process answers: Ray would ask for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # a word that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, why: str) -> UnfitMachine:
    named = address.removeprefix("ray://")
    remedy = "start one by `ray start --head`, or give the address of one"
    if address.startswith("ray://"):
        # Easily mixed up: what `ray start --head` prints is the cluster's own.
        remedy += (
            f"; at ray://HOST:PORT is Ray's client server, port {_CLIENT_PORT} by default; the cluster's own address "
            f"has no ray://: RAY_ADDRESS={named} with --cluster ray://auto"
        )
    return UnfitMachine(f"there is no Ray cluster at {address} ({why}); {remedy}")

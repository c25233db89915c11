"""How many processes a launcher has started, where rank 0 and this one are, and how long they wait for each other."""

from __future__ import annotations

import math
import os
import socket
import threading
from time import monotonic

from headrace.engine.schedulers.environment import adopt
from headrace.errors import UsageError
from headrace.machine.identity import host_name

START_TIMEOUT = "HEADRACE_START_TIMEOUT_S"
_START_TIMEOUT_S = 120.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PROBE_S = 3.0
_LOOK_UP_EVERY_S = 0.5


def launched_ranks() -> int | None:
    """Returns how many processes the launcher has started, None if there is no launcher.

    Raises UsageError where it has set only some of its variables, or a scheduler contradicts them.
    """
    adopt()
    given = [name for name in _VARIABLES if name in os.environ]
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    if len(given) < len(_VARIABLES):
        missing = sorted(set(_VARIABLES) - set(given))
        raise UsageError(f"the launcher set {', '.join(given)} but not {', '.join(missing)}")
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """Returns this process's number among those of the launcher; 0 if there is no launcher."""
    return int(os.environ["RANK"]) if launched_ranks() else 0


def local_rank() -> int:
    """Returns this process's number on its host, as the launcher says; 0 if it does not."""
    launched_ranks()
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isdecimal() else 0


def accelerate_option(name: str) -> str | None:
    """Returns an option that `accelerate launch` has passed on, as MIXED_PRECISION; None if it has not."""
    return os.environ.get(f"ACCELERATE_{name}")


def start_timeout_s() -> float:
    """Returns how long processes wait for each other to start; raises UsageError if that is set to no such number."""
    given = os.environ.get(START_TIMEOUT, str(_START_TIMEOUT_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{START_TIMEOUT}={given!r} must be a number of seconds above 0, as 600")
    return seconds


def own_address() -> str:
    """Returns the address by which this host reaches the launcher's first: there the others reach this one.

    Raises:
        UsageError: that is this host's address for itself.
    """
    named, number = os.environ["MASTER_ADDR"], master()
    with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system looks up the route.
        probe.connect((number, int(os.environ["MASTER_PORT"])))
        own: str = probe.getsockname()[0]
    if own == "::1" or own.startswith("127."):
        raise UsageError(
            f"MASTER_ADDR={named} is {own} on {host_name()}, which no other host reaches, and there are several; "
            "give every process the address of the first host in the network of all"
        )
    return own


def state_of(address: str) -> str:
    """Returns what a connection to an address meets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except ConnectionRefusedError:
        return f"no process listens at {address}; what rank 0 prints may say why"
    except OSError as error:
        return f"{address} does not answer ({error}); a firewall in between, or its host is down"
    return f"a process listens at {address} and does not answer"


def master() -> str:
    """Returns the number of MASTER_ADDR; raises UsageError if there is none.

    In Kubernetes a pod has a name only after it has begun, so others wait for it.
    """
    name, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    give_up = monotonic() + (start_timeout_s() if "KUBERNETES_SERVICE_HOST" in os.environ else 0)
    while True:
        try:
            return str(socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or monotonic() >= give_up:
                raise UsageError(
                    f"MASTER_ADDR={name} MASTER_PORT={port} on {host_name()} is no address: {error}"
                ) from error
        threading.Event().wait(_LOOK_UP_EVERY_S)


def is_here(number: str) -> bool:
    """Returns whether an address is one of this host's."""
    with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True

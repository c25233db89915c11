"""The run's secret: from the environment, from a file, or, on one host, from rank 0 over a Unix socket."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import stat
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

from headrace.errors import UsageError
from headrace.transport.local_client import user_of

SECRET, SECRET_FILE = "HEADRACE_SECRET", "HEADRACE_SECRET_FILE"

HOW_TO_MAKE = (
    '(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret), copy that file to every host, and '
    f"give it by {SECRET_FILE} or --secret-file"
)

_LEAST_CHARACTERS = 32
_MOST_BYTES = 4096
_AGAIN_S = 0.02


@functools.cache
def given_secret() -> bytes | None:
    """Returns the 32 bytes that the user's secret gives, None without one; see `read_secret`."""
    return read_secret(os.environ)


def read_secret(environment: MutableMapping[str, str]) -> bytes | None:
    """Returns the BLAKE2b digest, 32 bytes, of the secret that an environment holds or names; None without one.

    HEADRACE_SECRET is removed, so that no process that is started later inherits it.

    Raises UsageError if the secret has fewer than 32 characters, or others may read its file.
    """
    text, file = environment.pop(SECRET, ""), environment.get(SECRET_FILE, "")
    if not text and not file:
        return None
    source = SECRET if text else file
    secret = (text or _content(Path(file))).strip()
    if len(secret) < _LEAST_CHARACTERS:
        raise UsageError(
            f"the run's secret ({source}) has {len(secret)} characters, which can be guessed; "
            f"it must have at least {_LEAST_CHARACTERS}: {HOW_TO_MAKE}"
        )
    return hashlib.blake2b(secret.encode(), digest_size=32).digest()


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise UsageError(
                    f"the secret's file {path} has mode {stat.S_IMODE(found.st_mode):o} and belongs to user "
                    f"{found.st_uid}; it must be a file that user {os.geteuid()} alone can read: "
                    f"chown {os.geteuid()} {path}; chmod 600 {path}"
                )
            return file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the secret's file {path} cannot be read: {error}; make one: {HOW_TO_MAKE}") from error


def hand_out(name: str, text: str) -> socket.socket:
    """Gives a text to every process of this user on this host that asks for it by name, until the socket is shut down.

    Raises UsageError if another process of this host gives one by that name.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_abstract(name))
    except OSError as error:
        listener.close()
        raise UsageError(f"another run of this user has {name} ({error.strerror}); give another MASTER_PORT") from error
    listener.listen()

    def serve() -> None:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return  # it was shut down
            # One that has gone meanwhile needs it no more.
            with asking, suppress(OSError):
                if user_of(asking) == os.geteuid():
                    asking.sendall(text.encode())

    threading.Thread(target=serve, name="headrace-secret", daemon=True).start()
    return listener


def ask(name: str, within_s: float) -> str:
    """Returns the text that a process of this user hands out by this name.

    Raises TimeoutError if there is none in time, or it does not answer; ConnectionError if it ends before it has, and
    UsageError if it is another user's.
    """
    give_up, pause = monotonic() + within_s, threading.Event()
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(max(_AGAIN_S, give_up - monotonic()))
            try:
                asking.connect(_abstract(name))
            except (ConnectionRefusedError, BlockingIOError) as error:
                if monotonic() > give_up:
                    if isinstance(error, BlockingIOError):  # more wait to be accepted than may
                        raise _silent(within_s) from None
                    raise TimeoutError(f"no process of this host has it after {within_s:g} s") from None
                pause.wait(_AGAIN_S)
                continue
            if user_of(asking) != os.geteuid():
                raise UsageError(f"user {user_of(asking)} of this host has taken {name}; give another MASTER_PORT")
            try:
                with asking.makefile("rb") as answer:
                    text = answer.read().decode()
            except TimeoutError:
                raise _silent(within_s) from None
            if not text:
                raise ConnectionError("the process of this host that had it has ended")
            return text


def _silent(within_s: float) -> TimeoutError:
    return TimeoutError(f"the process of this host that has it does not answer within {within_s:g} s")


def _abstract(name: str) -> str:
    return f"\0headrace/{os.geteuid()}/{name}"

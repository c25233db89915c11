"""Where a server listens, and who may ask it: this machine alone, or clients that have the token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError

WHOLE = "headrace.whole"
"""In the scope of a request whose body has come to its end."""
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}


def is_loopback(host: str) -> bool:
    """Whether an address or name leads to this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def names_loopback(header: str) -> bool:
    """Whether a request's header Host names this machine by a loopback name.

    A page of another site can have a browser ask its own name, made to lead here.
    """
    name, _, port = header.rpartition(":")
    return (name if port.isdigit() else header) in _LOOPBACK


def is_foreign_origin(header: str) -> bool:
    """Whether a request's header Origin says that a page from elsewhere asks: not from a loopback name, or "null"."""
    return header != "" and not names_loopback(header.partition("://")[2])


def has_token(authorization: str, token: str) -> bool:
    """Whether a request's header Authorization names the token."""
    kind, _, given = authorization.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def check_access(host: str, token: str, public: bool) -> None:
    """Raises UsageError where a server would answer other machines without a token, and without --public.

    So for both: a request without the token would be refused, whatever --public says.
    """
    if token and public:
        raise UsageError("--public lets every machine ask without a token, and there is one; leave one of them out")
    if not is_loopback(host) and not token and not public:
        raise UsageError(
            f"--host {host} lets other machines ask; give a token by --token-file FILE, or say --public where "
            "every machine may ask"
        )


def read_token(path: Path) -> str:
    """Returns the token in a file.

    Raises:
        UsageError: there is no such file, others may read it, or its content is short or not plain.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"other users may read the token in {path}: chmod 600 {path}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token cannot be read from {path}: {error}") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise UsageError(
            f"the token in {path} has {len(token)} characters; it needs 16 at least, without spaces: "
            f"head -c 24 /dev/urandom | base64 > {path}"
        )
    return token


def listening_socket(host: str, port: int, backlog: int, option: str = "--port") -> socket.socket:
    """Returns a socket that listens; port 0 is a free one.

    Args:
        option: which names the port, for an error.

    Raises:
        UsageError: the port is in use, or may not be used.
        UnfitMachine: the address is none of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise UnfitMachine(f"{host} is no address of this machine: {error.strerror}") from None
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; name another {option}, 0 for a free one"
        ) from None


def url_of(bound: socket.socket) -> str:
    """Returns the address of a socket that listens, "http://127.0.0.1:8000"."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

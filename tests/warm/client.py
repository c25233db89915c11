"""Stands in for a Python program, and lets a warm process be it; see `server`. Needs no library: it begins in 20 ms."""

import array
import contextlib
import json
import os
import select
import signal
import socket
import sys

_REFUSED = 125
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(folder: str, program: str) -> None:
    """Does what `program` with `sys.argv` would.

    Args:
        folder: has the server's socket.
        program: that this one stands in for: Python itself, or a script.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(os.path.join(folder, "socket"))
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [each for each in descriptors if each != server.fileno() and _is_open(each)]
    order = {
        "program": program,
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "descriptors": descriptors,
    }
    waiting = {*_PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    server.sendmsg([json.dumps(order).encode()], [rights])
    pid = json.loads(server.recv(4096))["pid"]
    if pid is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
        os.execv(sys.executable, [sys.executable, *([] if program == sys.executable else [program]), *sys.argv[1:]])
    # A pipe that only this one still held open would never end for who reads it.
    for each in descriptors:
        os.close(each)
    # A signal that comes just before the system call does not interrupt it; what it writes here does.
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    for each in _PASSED_ON:
        signal.signal(each, lambda number, _: _pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
    while server not in select.select([server, woken], [], [])[0]:
        os.read(woken, 64)
    answer = server.recv(4096)
    status = json.loads(answer)["status"] if answer else _REFUSED
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(descriptor: int) -> bool:
    # The one that the folder was listed by is not.
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

"""A process that has imported what Python programs of tests import, and forks itself to be each of them.

    test ──► client, "python script.py" ──socket──► server ──fork──► script.py
             descriptors, arguments, environment, folder ►
             ◄ its process id, its exit code

A program is then what it would be, but for the seconds that importing torch takes: it has its own session, its client's
descriptors, environment and working directory, and a `__main__` of its own. What differs: modules are imported already.
Programs that would see the difference the server leaves to Python itself: those with options of the interpreter that it
does not know, with another package called headrace, or with environment variables that count when a library is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import linecache
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

from headrace.machine.allocator import prefer_large_pages

IMPORTED = ("torch._dynamo", "headrace.engine.local.process", "headrace.engine.local.fork_server_main",
            "headrace.engine.local.engine", "headrace.cli", "headrace.api.fit", "headrace.api.comparison",
            "headrace.strategies.mirrored", "headrace.models.zoo", "headrace.data.datasets",
            "headrace.parameter_server.replication.failover", "headrace.expert_parallel.balance",
            "sklearn.datasets", "rich.progress", "typer._adapters", "pydantic.plugin._loader",
            "torch.utils.serialization.config", "torch.profiler._cupti_monitor",
            "datasets", "transformers.models.gpt2.modeling_gpt2", "transformers.data.data_collator",
            "pytest", "hypothesis")  # fmt: skip
AT_LOAD = ("OMP_", "MKL_", "KMP_", "GOMP_", "LD_", "GLIBC_", "TORCH_", "LC_", "LANG", "PYTHON")
"""How variables begin that count when a library, or Python, begins; those below can be honoured later."""
LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "GLIBC_TUNABLES", "OMP_NUM_THREADS",
         "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_WAIT_POLICY", "PYTHONMALLOC"}  # fmt: skip
"""torchrun gives OMP_NUM_THREADS and TORCH_NCCL_ASYNC_ERROR_HANDLING to each of its ranks; how threads wait, and where
Python's objects are, changes no result."""
UNSET_IS_ANY = {"PYTHONHASHSEED"}
"""Python chooses where they are not set; the server has what workers get."""
MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables of glibc's memory, and what `mallopt` calls them (malloc.h)."""
_BEGUN_WITH = dict(os.environ)
_added: dict[str, str] = {}
"""What libraries add to it while they are imported."""
_PYTHON = sys.executable
_COERCED = {"LC_CTYPE": "C.UTF-8"} if os.environ.get("LC_CTYPE") == "C.UTF-8" else {}
"""What Python gives itself and its children where the locale is C (PEP 538)."""
_LARGE_BYTES = 512 << 20
_MESSAGE_BYTES, _DESCRIPTORS = 1 << 18, 250
_HIGH = 512


def main(folder: str, *left_out: str) -> None:
    """Serves until standard input ends.

    Args:
        folder: for the socket.
        left_out: packages that are not imported.
    """
    path = [entry for entry in sys.path if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # Before transformers is imported, which imports torchvision.
    importlib.import_module("headrace.bench.library").declare_operators()
    for name in IMPORTED:
        if name.partition(".")[0] in left_out:
            continue
        importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    if len(tasks) > 1:
        raise RuntimeError(f"importing has started {len(tasks) - 1} threads, and a process with threads is not forked")
    _added.update({name: value for name, value in os.environ.items() if _BEGUN_WITH.get(name) != value}, **_COERCED)
    # What a program starts as Python is warm as well.
    sys.executable = os.path.join(folder, "python")
    gc.collect()
    gc.freeze()
    os.mkdir(os.path.join(folder, "processes"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.path.join(folder, "aside"))
    listener.listen(64)
    os.rename(os.path.join(folder, "aside"), os.path.join(folder, "socket"))
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: dict[int, socket.socket] = {}
    while True:
        ready = select.select([0, listener, woken, *clients.values()], [], [])[0]
        if 0 in ready:
            break
        if woken in ready:
            os.read(woken, 4096)
            _report(clients)
        for pid, client in clients.items():
            # It says nothing more: what can be read is its end.
            if client in ready and client.fileno() >= 0:
                _kill(pid)
        if listener in ready:
            _take(listener.accept()[0], clients, path, folder)
    for pid in clients:
        _kill(pid)


def _take(client: socket.socket, clients: dict[int, socket.socket], path: list[str], folder: str) -> None:
    try:
        message, descriptors, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, _DESCRIPTORS)
    except ConnectionResetError:
        message, descriptors = b"", []
    if not message:
        # The client was killed before it could say what it wants; all others go on.
        client.close()
        return
    order = json.loads(message)
    plan = _understood(order, path)
    pid = None
    if plan is not None:
        pid = os.fork()
        if pid == 0:
            # Before the program can say anything by which it would be looked for.
            _name(client, folder)
            _become(order, plan, descriptors)
        clients[pid] = client
    for each in descriptors:
        os.close(each)
    # A client that has been killed meanwhile is noticed by its end.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(json.dumps({"pid": pid}).encode())
    if pid is None:
        client.close()


def _name(client: socket.socket, folder: str) -> None:
    """Lets `programs.real` find this process by the one that stands in for it."""
    name = os.path.join(folder, "processes", str(_pid_of(client)))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    os.symlink(str(os.getpid()), name)


def _pid_of(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _report(clients: dict[int, socket.socket]) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with clients.pop(pid) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _understood(order: dict[str, Any], path: list[str]) -> tuple[str, list[str], list[str]] | None:
    """Returns how to run the program ("-c", "-m" or "file"), `sys.argv` and `sys.path`; None to leave it to Python."""
    environment = order["environment"]
    for name in {*environment, *_BEGUN_WITH}:
        counts = name.startswith(AT_LOAD) and name not in LATER and name not in _added
        free = name in UNSET_IS_ANY and name not in environment
        if counts and not free and environment.get(name) != _BEGUN_WITH.get(name):
            return None
    arguments = list(order["arguments"])
    how, safe = "file", False
    if order["program"] != _PYTHON:
        arguments.insert(0, order["program"])
    else:
        while arguments and arguments[0] in ("-P", "-u"):
            safe |= arguments.pop(0) == "-P"
        if arguments and arguments[0] in ("-c", "-m"):
            how = arguments[0]
            arguments = arguments[1:]
    if not arguments or (how == "file" and arguments[0].startswith("-")):
        return None
    first = {"-c": "", "-m": order["cwd"], "file": os.path.dirname(os.path.join(order["cwd"], arguments[0]))}[how]
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [*([] if safe else [first]), *entries, *path]
    return (how, arguments, entries) if _has_our_package(entries, order["cwd"]) else None


def _has_our_package(entries: list[str], cwd: str) -> bool:
    ours = sys.modules["headrace"].__file__
    for entry in entries:
        found = Path(cwd, entry, "headrace", "__init__.py")
        if found.exists():
            return ours is not None and found.samefile(ours)
    return True  # an installed one, which .pth files lead to


def _become(order: dict[str, Any], plan: tuple[str, list[str], list[str]], descriptors: list[int]) -> None:
    code = 1
    try:
        os.setsid()
        _take_over(descriptors, order["descriptors"])
        _prepare(order)
        code = _run(*plan)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not back into the server's frames, and without the interpreter's end, which takes half a second.
        os._exit(code)


def _take_over(descriptors: list[int], numbers: list[int]) -> None:
    """Gives the descriptors their numbers, and closes all others."""
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in descriptors]
    os.closerange(0, _HIGH)
    for each, number in zip(aside, numbers, strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)


def _prepare(order: dict[str, Any]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    environment = order["environment"]
    os.environ.clear()
    os.environ.update({**_added, **environment})
    mallopt = ctypes.CDLL(None).mallopt
    for name, parameter in MALLOC.items():
        if name in environment:
            mallopt(parameter, min(int(environment[name]), 2**31 - 1))
    if "hugetlb=1" in environment.get("GLIBC_TUNABLES", ""):
        prefer_large_pages(_LARGE_BYTES)
    if environment.get("OMP_NUM_THREADS", "").isdecimal():
        importlib.import_module("torch").set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    _open_stdout(unbuffered=bool(environment.get("PYTHONUNBUFFERED")))


def _open_stdout(unbuffered: bool) -> None:
    """Opens stdout anew: the server's believes that it can seek, as in the server's own file."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    try:
        raw = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115 - until the end
    except OSError:  # the caller has closed it
        sys.stdout = None  # type: ignore[assignment]
        return
    sys.stdout = io.TextIOWrapper(
        raw, encoding=encoding, errors=errors, line_buffering=raw.isatty(), write_through=unbuffered
    )


def _run(how: str, arguments: list[str], path: list[str]) -> int:
    """Runs the program to its end, threads and exit functions included; returns its exit code."""
    sys.argv[:] = ["-c" if how == "-c" else arguments[0], *arguments[1:]]
    sys.path[:] = path
    try:
        _execute(how, arguments[0])
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt as error:
        _show(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException as error:
        _show(error)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _execute(how: str, what: str) -> None:
    if how == "-m":
        import runpy

        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    page = types.ModuleType("__main__")
    sys.modules["__main__"] = page
    name = "<string>" if how == "-c" else what
    if how == "file":
        page.__file__ = what
    elif sys.version_info >= (3, 13):
        # Python shows lines of -c in tracebacks since then.
        linecache.cache[name] = (len(what), None, what.splitlines(keepends=True), name)
    exec(compile(what if how == "-c" else Path(what).read_bytes(), name, "exec"), page.__dict__)


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that has imported everything and started no thread: it forks a worker in milliseconds.

    launcher ──socket──► fork server ──fork──► worker 0, worker 1, ...
             {"import": names}, {"spawn": rank}, descriptors ►
             ◄ {"imported": true}, {"ended": rank, "status": ...}, {"unstarted": rank}

Importing torch takes over a second; forking a process that has done it, a hundredth of that. The fork server ends
when its socket to the launcher ends, and takes its workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from headrace.engine.local.environment import take_environment
from headrace.shared_memory.descriptors import receive_descriptors

_MESSAGE_BYTES = 64 * 1024
_DESCRIPTORS = 8
_SET_PARENT_DEATH_SIGNAL = 1


def load() -> None:
    """Imports torch, headrace, and what the first job of a process would import; not the compiler."""
    gc.disable()
    import torch.utils.serialization.config  # noqa: F401

    import headrace.engine.local.process
    import headrace.tasks  # noqa: F401

    gc.enable()


def main(descriptor: int) -> None:
    """Serves the launcher at the other end of an inherited socket until it hangs up."""
    launcher = socket.socket(fileno=descriptor)
    load()
    from headrace.machine.dynamo import postpone_compiler

    postpone_compiler()
    # None of it is ever garbage, and searching it would stop a worker or server for a tenth of a second.
    gc.freeze()
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher.send(b'{"ready":true}')
    workers: dict[int, int] = {}
    # Not select, which is limited to 1,024 descriptors: the inherited one has the number that it has in the launcher.
    inputs = select.poll()
    inputs.register(launcher, select.POLLIN)
    inputs.register(read_end, select.POLLIN)
    try:
        while True:
            ready = [descriptor for descriptor, _ in inputs.poll()]
            if read_end in ready:
                os.read(read_end, 4096)
                _report(launcher, workers)
            if launcher.fileno() in ready:
                message, descriptors = receive_descriptors(launcher, _MESSAGE_BYTES, _DESCRIPTORS)
                if not message:
                    break
                request = json.loads(message)
                if "import" in request:
                    take_environment(request)
                    _import(request["import"])
                    launcher.send(b'{"imported":true}')
                elif not _handle(request, descriptors, workers, [launcher.fileno(), read_end, write_end]):
                    launcher.send(json.dumps({"unstarted": request["spawn"]}).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher has ended
    finally:
        _kill(workers)


def _handle(request: dict[str, Any], descriptors: list[int], workers: dict[int, int], own: list[int]) -> bool:
    """Does what the launcher asks; returns False where the system forks no further process."""
    if "kill" in request:
        for pid, rank in workers.items():
            if rank in request["kill"]:
                _end(pid)
        return True
    try:
        pid = os.fork()
    except BlockingIOError:
        return False
    else:
        if pid == 0:
            _become_worker(request, descriptors, own)
        # A worker and the processes that user code starts in it are a group, which ends as a whole.
        os.setpgid(pid, pid)
        workers[pid] = request["spawn"]
        return True
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _import(names: Sequence[str]) -> None:
    """Imports modules once for all workers; one that cannot be is for a worker to report, which imports it again."""
    from headrace.machine.dynamo import import_whole

    before = len(sys.modules)
    for name in names:
        with contextlib.suppress(ImportError):
            import_whole(name)
    if len(sys.modules) > before:
        gc.freeze()


def _become_worker(request: dict[str, Any], descriptors: list[int], own: list[int]) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in own:
        os.close(descriptor)
    from headrace.engine.local.process import run

    code = 1
    try:
        code = run(request, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        # Never through the fork server's own frames or its interpreter's end, also where an error is raised here, such
        # as that of a log on a full disk.
        os._exit(code)


def _report(launcher: socket.socket, workers: dict[int, int]) -> None:
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        rank = workers.pop(pid)
        if status != 0:
            _end_group(pid)
        launcher.send(json.dumps({"ended": rank, "status": os.waitstatus_to_exitcode(status)}).encode())


def _kill(workers: dict[int, int]) -> None:
    for pid in workers:
        _end(pid)
    for pid in workers:
        os.waitpid(pid, 0)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _end_group(pid)


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # The interpreter's own end would take half a second to free what the system frees at once.
    os._exit(0)

"""The process of one rank on a node of a Ray cluster: `python -m headrace.engine.ray.process DESCRIPTOR NICENESS`.

It reads what to run from stdin, does it as a launcher's process does, and writes JSON lines to the descriptor: how far
the run is, and last how it ended. Where stdin ends, its agent has ended: then this process ends, too. A byte before
asks it to leave the others.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import IO, Any

from headrace.engine.base import LEFT, RunProgress
from headrace.engine.local.fork_server_main import load
from headrace.engine.local.process import redirect
from headrace.engine.shipping import unpack
from headrace.engine.torchrun.engine import LaunchedEngine, join_group
from headrace.errors import HeadraceError, JobError, PeerLost, user_traceback
from headrace.machine import disk
from headrace.machine.identity import machine_identity
from headrace.shared_memory.segment import memory_file, set_length
from headrace.worker.run_spec import LAST_LOG_LINE, RunSpec

_TELL_EVERY_S = 0.5


def main() -> None:
    """Runs one rank as its agent asks for."""
    # Ray blocks it in all that a node starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _take_niceness(int(sys.argv[2]))
    # While the calling process checks the job, and the garbage collector never searches it, as in local workers.
    load()
    gc.freeze()
    says = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)
    os.set_inheritable(says.fileno(), False)
    stdin = sys.stdin.buffer
    header = stdin.readline()
    if not header:
        return
    request = json.loads(header)
    code, data = stdin.read(request["code"]), stdin.read(request["data"])
    leaves = threading.Event()
    threading.Thread(target=_follow, args=(os.dup(0), leaves), name="headrace-agent", daemon=True).start()
    os.environ.update(request["environment"])
    if disk.is_folder(Path(request["directory"])):
        os.chdir(request["directory"])
    # Behind what this node has: the folders of the caller that are here, too.
    sys.path += [path for path in request["path"] if path not in sys.path and disk.exists(Path(path))]
    log = Path(request["log"])
    log.parent.mkdir(parents=True, exist_ok=True)
    redirect(log)
    spec = None
    try:
        spec = _unpacked(request, code, data)
        _say(says, {"status": _run(spec, request, says, leaves)})
    except BaseException as error:
        _say(says, {**_failure(error), "unpacked": spec is not None})
        shown = str(error) if isinstance(error, HeadraceError) else user_traceback(error, fallback=True)
        print(LAST_LOG_LINE, shown, sep="\n", file=sys.stderr)  # noqa: T201  (standard error is this rank's log)
        sys.exit(error.exit_code if isinstance(error, HeadraceError) else 1)


def _take_niceness(wanted: int) -> None:
    """Gives this process the niceness that its node was started with; Ray makes what a node starts nicer, by 15."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    except PermissionError:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # In the log of its actor, because its own is not open yet.
        print(  # noqa: T201
            f"headrace: this process computes with niceness {own}, because its user may not lower it: others on the "
            f"node go before it; start the node by `RAY_worker_niceness={wanted} ray start ...`",
            file=sys.stderr,
        )


def _unpacked(request: Mapping[str, Any], code: bytes, data: bytes) -> RunSpec:
    """Returns the run with the directory and on the clock of this host."""
    descriptor = -1
    if data:
        descriptor = memory_file("data")
        set_length(descriptor, len(data), "data")
        os.pwrite(descriptor, data, 0)
    try:
        spec: RunSpec = unpack(code, descriptor, len(data))
    except ImportError as error:
        raise JobError(
            f"the job arrived but this node cannot import what it uses: {error}; install it on every node, or name it "
            "in hr.RayEngine(runtime_env={'pip': [...]}) or {'working_dir': '.'} (ray job submit --runtime-env-json)"
        ) from error
    except Exception as error:
        raise JobError(f"the job arrived but cannot be unpacked here: {type(error).__name__}: {error}") from error
    here = request["machine"] == machine_identity().partition(" ")[0]
    started = spec.started if here else monotonic() - request["passed_s"]
    rank, roles = int(request["environment"]["RANK"]), list(spec.plan.roles)
    if request["node"]:
        # It shares memory with none of those that were on its rank's node.
        roles[rank] = replace(roles[rank], host=request["node"])
    if request["device"]:
        # Ray has given it another one.
        device, identity = request["device"]
        roles[rank] = replace(roles[rank], device=device, identity=identity)
    plan = replace(spec.plan, roles=tuple(roles))
    return replace(spec, run_dir=Path(request["run_dir"]), started=started, plan=plan)


def _run(spec: RunSpec, request: Mapping[str, Any], says: IO[str], leaves: threading.Event) -> str:
    # Any of these may be lost.
    elastic = spec.plan.min_workers > 0
    group, over = join_group(spec.timeout_s, request["encrypt"], relays=elastic), threading.Event()
    engine = LaunchedEngine(group, request["threads"])

    def tell() -> None:
        while not over.wait(_TELL_EVERY_S):
            now = RunProgress.read(group.page)
            progress = [now.step, now.loss, now.examples]
            views, leader = group.views, group.view_leader
            trains = views is not None and views.view.number >= 0
            _say(says, {"progress": progress, "trains": trains, "store": leader.store_address if leader else ""})
            if views and trains and leaves.is_set():
                leaves.clear()
                views.let_leave([views.me])

    teller = threading.Thread(target=tell, name="headrace-progress", daemon=True)
    if group.rank == 0 or elastic:
        teller.start()
    try:
        status = engine.run(spec, lambda _: None)
        if status != LEFT:
            # The store ends with rank 0, which must not end before the others.
            group.agree("ended")
        return status
    finally:
        over.set()
        if teller.is_alive():
            teller.join()
        engine.close()


def _failure(error: BaseException) -> dict[str, Any]:
    """Returns what the caller needs to raise the same error."""
    lost = {"rank": error.rank, "host": error.host, "cause": error.cause} if isinstance(error, PeerLost) else {}
    ours = isinstance(error, HeadraceError)
    origin = error.__cause__ if ours else error
    return {
        "error": type(error).__name__,
        "message": str(error),
        "traceback": user_traceback(origin, fallback=not ours) if origin else "",
        "exit_code": error.exit_code if isinstance(error, HeadraceError) else 1,
        "lost": lost,
    }


def _say(says: IO[str], what: Mapping[str, Any]) -> None:
    says.write(json.dumps(what) + "\n")
    says.flush()


def _follow(stdin: int, leaves: threading.Event) -> None:
    # The agent's end of the pipe closes when it ends, however it ends.
    while os.read(stdin, 1):
        leaves.set()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

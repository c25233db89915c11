"""The actor of one rank: it starts the rank's process on its node, passes on what it says, and ends it.

It imports neither torch nor a user's code, so that it begins in no time; the process does both meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.devices import DEVICES, GPU
from headrace.engine.local.fork_server import environment_of_workers
from headrace.machine import disk
from headrace.machine.accelerators import memories
from headrace.machine.identity import host_name, installed_versions
from headrace.machine.resources import cores, spare_memory_bytes

_WATCH_S = 1.0
_LAST_WORDS_S = 1.0
_LOG_CHARACTERS = 4000
LEAVE = b"l"
"""What the process reads from stdin after its request, when it is to leave the others."""

_PROGRAM = (sys.executable, "-P", "-m", "headrace.engine.ray.process")


class RankAgent:
    """Starts the process of one rank, and tells how far it is; where its own process ends, that one ends, too."""

    def __init__(self) -> None:
        # Ray sets it to the CPUs that the actor reserves; the plan says how many threads a process has.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._process = _Process()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def describe(self) -> dict[str, Any]:
        """Returns what its node has and is."""
        import ray

        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": host_name(),
            "versions": installed_versions(),
            "cores": cores(),
            "memory_bytes": spare_memory_bytes(),
            "gpus": [str(index) for index in ray.get_gpu_ids()],
            "gpu_bytes": max(memories(DEVICES[GPU]), default=0),
        }

    def free_port(self, address: str) -> int:
        """Returns a port of the node that no process has."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port: int = probe.getsockname()[1]
            return port

    def folder(self, wanted: str, mark: str) -> str:
        """Returns the run's directory here: the wanted one if it has the mark, else one of this node."""
        if disk.exists(Path(wanted) / mark):
            return wanted
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="headrace-")
        return self._folder.name

    def begin(self, request: Mapping[str, Any], code: bytes, data: bytes) -> dict[str, Any]:
        """Lets the process begin; returns what `watch` does, and the `folder` to which the process writes."""
        if self._process.begun:
            self._process = _Process()
        # Asked again, because Ray may have restarted this actor on another node.
        run_dir, rank = self.folder(request["run_dir"], request["mark"]), request["environment"]["RANK"]
        log = f"{run_dir}/logs/rank-{rank}.log"
        # Ray shows what actors write to stdout on that of the caller, where results go.
        print(f"headrace: rank {rank} prints to {log}", file=sys.stderr, flush=True)  # noqa: T201
        self._process.begin({**request, "run_dir": run_dir, "log": log}, code, data)
        return {**self.watch(), "folder": run_dir}

    def watch(self) -> dict[str, Any]:
        """Blocks until the process has ended, but not for long; returns how far it is, or how it has ended.

        Ray wakes the thread of an actor a hundred times a second, except while it blocks in a call.
        """
        return self._process.wait(_WATCH_S)

    def files(self, folder: str, known: Mapping[str, int], ended: bool = False) -> dict[str, bytes]:
        """Returns what is new in events and logs, by name; `known` has the bytes that were read.

        Whole lines alone, unless the run has `ended`: then nothing may follow the last words of a log.
        """
        found = {}
        root = Path(folder)
        for path in (*root.glob("events/*.jsonl"), *root.glob("logs/*.log")):
            name = str(path.relative_to(root))
            with path.open("rb") as stream:
                stream.seek(known.get(name, 0))
                content = stream.read()
            if not (ended and path.suffix == ".log"):
                content = content[: content.rfind(b"\n") + 1]
            if content:
                found[name] = content
        return found

    def file(self, path: str) -> bytes | None:
        """Returns the content of a file, None if there is none."""
        return Path(path).read_bytes() if disk.is_file(Path(path)) else None

    def stop(self, number: int) -> None:
        """Sends a signal to the process."""
        self._process.signal(number)

    def leave(self) -> None:
        """Asks the process to leave the others, which go on."""
        self._process.leave()

    def close(self) -> None:
        """Ends the process, and removes what it has written to a folder of this node."""
        self._process.end()
        if self._folder is not None:
            self._folder.cleanup()


class _Process:
    """One process of a rank, `python -m headrace.engine.ray.process`; it reads its request from stdin.

    At the end of stdin, which is that of this process, it ends, too.
    """

    def __init__(self) -> None:
        self.begun = False
        self._told: dict[str, Any] = {}
        self._code: int | None = None
        self._ended = threading.Event()
        said, says = os.pipe()
        self._child = subprocess.Popen(
            # This process's parent is the node's raylet.
            [*_PROGRAM, str(says), str(os.getpriority(os.PRIO_PROCESS, os.getppid()))],
            stdin=subprocess.PIPE,
            pass_fds=(says,),
            start_new_session=True,
            # With what a runtime environment has added to the path.
            env=environment_of_workers(),
        )
        os.close(says)
        self._reader = threading.Thread(target=self._read, args=(said,), name="headrace-rank", daemon=True)
        self._reader.start()
        threading.Thread(target=self._await_end, name="headrace-end", daemon=True).start()

    def begin(self, request: Mapping[str, Any], code: bytes, data: bytes) -> None:
        self.begun = True
        self._log = Path(request["log"])
        header = json.dumps({**request, "code": len(code), "data": len(data)})
        assert self._child.stdin is not None
        # Where it has ended already, `wait` says so.
        with suppress(BrokenPipeError):
            for part in (header.encode() + b"\n", code, data):
                self._child.stdin.write(part)
            self._child.stdin.flush()

    def wait(self, within_s: float) -> dict[str, Any]:
        """Returns what it said last, and if it has ended its exit code and the end of its log, too."""
        if not self._ended.wait(within_s):
            return self._told
        log = self._log.read_text(encoding="utf-8", errors="replace") if disk.exists(self._log) else ""
        return {"code": self._code, "log": log[-_LOG_CHARACTERS:], **self._told}

    def signal(self, number: int) -> None:
        if self._code is None:
            self._child.send_signal(number)

    def leave(self) -> None:
        assert self._child.stdin is not None
        # Where it has ended already, `wait` says so.
        with suppress(BrokenPipeError):
            self._child.stdin.write(LEAVE)
            self._child.stdin.flush()

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.kill()
        self._ended.wait()
        self._child.stdin.close()

    def _await_end(self) -> None:
        self._code = self._child.wait()
        # Not for long: processes that it has started may hold the pipe, too.
        self._reader.join(_LAST_WORDS_S)
        self._ended.set()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as stream:
            for line in stream:
                self._told = json.loads(line)

"""Plants faults in copies of the package, one at a time, and lets `headrace verify` look for them.

python benchmarks/verify-faults/main.py [WORD ...] [--results FILE]
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import platform
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
TIMEOUT_S = 300
SCRIPT = "script "
"""What the kinds begin with that are plain scripts."""


def forked(source: Path, kind: str, strategy: str, processes: bool, causes: bool) -> dict[str, Any]:
    """Verifies a kind of job with the package in `source`, in a forked process; returns what came out, or the error."""
    output = source / "output.json"
    output.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sys.path[:0] = [str(source), str(HERE)]
        os.environ["PYTHONPATH"] = str(source)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            output.write_text(json.dumps(trial(source, kind, strategy, processes, causes)), encoding="utf-8")
        finally:
            os._exit(0)
    began = time.monotonic()
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() - began > TIMEOUT_S:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    return json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"error": "nothing came out"}


def trial(source: Path, kind: str, strategy: str, processes: bool, causes: bool) -> dict[str, Any]:
    """Verifies here, with the package that `sys.path` has first.

    Workers are threads, or where `processes` are asked for (threads share random numbers), processes.
    """
    hr: Any = importlib.import_module("headrace")
    if not causes:
        importlib.import_module("headrace.api.verification.verify").SUSPECTS = {}
    try:
        if kind.startswith(SCRIPT):
            found = script_verified(source, kind.removeprefix(SCRIPT))
        else:
            engine = None if processes else hr.ThreadEngine()
            found = importlib.import_module("job").verified(kind, strategy, engine)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "modules": libraries()}
    return {"differ": [row.what for row in found.differences], "cause": found.cause, "modules": libraries()}


def script_verified(source: Path, kind: str) -> Any:
    """Does what `headrace verify script.py KIND` does, with forked processes, which need not import torch again."""
    identity: Any = importlib.import_module("headrace.machine.identity")
    steps: Any = importlib.import_module("headrace.api.verification.script_steps")
    importlib.import_module("headrace").setup  # noqa: B018
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    folders = [source / "alone", source / "launched"]
    for folder, world in zip(folders, (1, 2), strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        launched = {**address, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)} if world > 1 else {}
        asked = {identity.STEPS_FOLDER: str(folder), identity.STEPS: "6"}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **launched} if launched else {} for rank in range(world)]
        pids = [run_script(kind, {**asked, **rank}) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"{folder.name} ended with exit codes {codes}")
    return steps.compare_scripts(HERE / "script.py", *folders, 2)


def run_script(kind: str, environment: Mapping[str, str]) -> int:
    """Runs the script in a forked process; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    # What the parent cleans up at its end is not this process's.
    atexit._clear()
    os.environ |= environment
    sys.argv[1:], code = [kind], 1
    try:
        runpy.run_path(str(HERE / "script.py"), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def libraries() -> list[str]:
    """Returns the modules of libraries that are imported here: the parent imports them for the next trials."""
    mine = ("headrace", "job", "__m", "mutants")
    return [name for name in list(sys.modules) if not name.startswith(mine)]


def outcome(folder: Path, fault: Mapping[str, Any]) -> dict[str, Any]:
    """Plants a fault, verifies, and takes it out again."""
    file = folder / "headrace" / fault["file"]
    text = file.read_text(encoding="utf-8")
    names = ("what", "file", "kind", "strategy", "tests")
    found: dict[str, Any] = {name: fault.get(name, "") for name in names}
    if text.count(fault["old"]) != 1:
        return {**found, "found": False, "by": f"stale: its text is there {text.count(fault['old'])} times"}
    write(file, text.replace(fault["old"], fault["new"]))
    wanted = fault.get("cause", "")
    try:
        result = forked(folder, fault["kind"], fault.get("strategy", ""), bool(fault.get("processes")), bool(wanted))
    finally:
        write(file, text)
    differ, error, cause = result.get("differ", []), result.get("error", ""), result.get("cause", "")
    # A fault that only breaks the program is found by anything.
    named = (bool(differ) or "RanksDiffer" in error) and wanted in cause
    by = (differ or [error])[0] + f" (cause: {cause})" * bool(wanted)
    return {**found, "found": named, "by": by}


def write(file: Path, text: str) -> None:
    """Writes a file with a time of its own: compiled files are told apart by whole seconds."""
    later = int(file.stat().st_mtime) + 1
    file.write_text(text, encoding="utf-8")
    os.utime(file, (later, later))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="also without a fault")
    chosen = parser.parse_args(arguments)
    every = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))["mutant"]
    faults = [each for each in every if not chosen.words or any(word in each["what"] for word in chosen.words)]
    found, began_s = [], time.monotonic()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE / "headrace", folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
        for module in forked(folder, "plain", "pipeline", False, False)["modules"]:
            try:
                importlib.import_module(module)
            except ImportError:
                continue
        kinds = {(f["kind"], f.get("strategy", ""), bool(f.get("processes"))) for f in faults if chosen.check}
        for kind, strategy, own in sorted(kinds):
            if (result := forked(folder, kind, strategy, own, False)).get("differ") != []:
                result.pop("modules", None)
                print(f"without a fault {kind}, {strategy}: {result}", flush=True)
        for fault in faults:
            began = time.monotonic()
            found.append(outcome(folder, fault))
            verdict = "found" if found[-1]["found"] else "NOT FOUND"
            print(
                f"{verdict:<10}{fault['what']}: {found[-1]['by']:.150} [{time.monotonic() - began:.0f} s]", flush=True
            )
    count = sum(each["found"] for each in found)
    print(f"{count} of {len(found)} in {time.monotonic() - began_s:.0f} s")
    if chosen.results:
        facts = {"date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count()}
        record = {**facts, "seconds": round(time.monotonic() - began_s), "found": count, "faults": found}
        chosen.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(count != len(found))


if __name__ == "__main__":
    main(sys.argv[1:])

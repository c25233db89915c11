"""Runs a script of `ports/` as it is alone, and its form for several processes in two of them; a program of its own.

A line that ends in `# headrace` is not in the script as it is; `# headrace, was: ...` says what stands there instead.
Every process is forked from this one, which has imported torch, and has the variables of a launcher.

    python both_ways.py FOLDER    takes names of scripts from stdin, a line each; writes FOLDER/mnist-alone.json,
                                  -0.json and -1.json, and what each printed; prints the name when it is done
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # What optimizers import, once for all processes.
from torch import nn

import headrace.api.plain_script.setup  # noqa: F401

PORTS = Path(__file__).parent / "ports"
WORLD = 2
_CHANGED = re.compile(r"^(\s*)(\S.*?)  # headrace(, was: (.*))?$")


def lines_of(name: str) -> tuple[list[str], int]:
    """Returns the lines of a script as it is, and how many of its form for several processes are changed."""
    lines, changed = [], 0
    for line in (PORTS / f"{name}.py").read_text().splitlines():
        found = _CHANGED.match(line)
        changed += found is not None
        if found is None or found[4]:
            lines.append(found[1] + found[4] if found else line)
    return lines, changed


def _numbers(space: dict[str, Any]) -> dict[str, list[float]]:
    """Returns what a script leaves: its `history`, and the parameters and buffers of its models."""
    found: dict[str, list[float]] = {"history": space.get("history", [])}
    for name, value in space.items():
        if isinstance(value, nn.Module):
            state = {key: each for key, each in value.state_dict().items() if isinstance(each, torch.Tensor)}
            found |= {f"{name}.{key}": each.detach().double().flatten().tolist() for key, each in state.items()}
    return found


def _run(name: str, folder: Path, rank: int | None, port: int) -> int:
    """Is one process of a script; returns its exit code."""
    place = "alone" if rank is None else str(rank)
    text = "\n".join(lines_of(name)[0]) if rank is None else (PORTS / f"{name}.py").read_text()
    if rank is not None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ |= {name: str(value) for name, value in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work = folder / name / ("alone" if rank is None else "processes")
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    sys.path.insert(0, str(PORTS.parent))
    sys.argv = [f"{name}.py"]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # A script that saves its whole model finds its classes here.
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(text, f"{name}.py", "exec"), vars(main))
    except Exception as error:
        traceback.print_exc()
        # As where Python itself ends by an error.
        sys.last_value = error
        return 1
    (folder / f"{name}-{place}.json").write_text(json.dumps(_numbers(vars(main))))
    return 0


def _fork(name: str, folder: Path, rank: int | None, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(folder / f"{name}-{'alone' if rank is None else rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = _run(name, folder, rank, port)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def main(folder: Path) -> None:
    """Runs the scripts that are asked for."""
    for line in sys.stdin:
        name, port = line.strip(), _free_port()
        for child in [_fork(name, folder, rank, port) for rank in (None, *range(WORLD))]:
            os.waitpid(child, 0)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

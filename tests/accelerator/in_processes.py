"""Runs a script in two processes, by Accelerate or with its import changed; a program of its own.

    python in_processes.py LIBRARY FOLDER SCRIPT ARGUMENT ...    writes FOLDER/LIBRARY-0.json, -1.json and -0.txt

The processes are forked from this one, which has imported torch, and have the variables of a launcher.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

WORLD = 2
HERE = Path(__file__).parent


def run(library: str, folder: Path, script: str, *arguments: object) -> list[dict[str, Any]]:
    """Returns the numbers that the processes of a script leave; a script that is killed leaves none."""
    texts = [str(each) for each in (__file__, library, folder, HERE / script, *arguments)]
    subprocess.run([sys.executable, *texts], check=False)
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{library}-*.json"))]


def _run(library: str, folder: Path, script: Path, rank: int, port: int) -> int:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    text = script.read_text()
    if library == "headrace":
        text = text.replace("from accelerate import Accelerator", "from headrace.accelerate import Accelerator")
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(text, script.name, "exec"), vars(main))
    except Exception as error:
        traceback.print_exc()
        # As where Python itself ends by an error.
        sys.last_value = error
        return 1
    (folder / f"{library}-{rank}.json").write_text(json.dumps(vars(main)["numbers"]))
    return 0


def _fork(library: str, folder: Path, script: Path, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(folder / f"{library}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = _run(library, folder, script, rank, port)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    library, folder, script = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    sys.argv = sys.argv[3:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [_fork(library, folder, script, rank, port) for rank in range(WORLD)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(1 if any(codes) else 0)

"""`python`, `headrace` and `torchrun` that begin warm: folders of programs for a PATH, one for each tree of sources."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

PYTHON = str(Path(sys.prefix, "bin", "python"))
"""The interpreter itself, also while `sys.executable` is a warm one."""
ROOT = Path(__file__).resolve().parents[2]
_CLIENT = Path(__file__).with_name("client.py")
_SERVER = Path(__file__).with_name("server.py")
_START_S = 120.0
"""Of the server's own processor time: how long others keep it waiting says nothing of it."""
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""OpenBLAS and Arrow would start threads while they are loaded, and a process with threads is not forked."""
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_TOP_PAD_": str(64 << 20)}
"""Python's objects, too, are in large pages: a fork copies the table of pages, and takes a quarter of the time."""

_HASHES = {"PYTHONHASHSEED": "0"}
"""As in workers: with another seed they would not begin warm."""

_folders: list[Path] = []
_joined: list[Path] = []
_servers: dict[Path, subprocess.Popen[bytes]] = {}


@cache
def programs(source: Path = ROOT / "src") -> Path:
    """Returns a folder of programs; their server is started with the first call, and ends with the process that did.

    Args:
        source: the folder of the package that they have imported.
    """
    begun = Path(sys.executable).parent
    if source == ROOT / "src" and (begun / "socket").exists():
        # This process is such a program itself, and its server goes on.
        return begun
    folder = _joined[0] if _joined and source == ROOT / "src" else launch(source)
    server = int((folder / "pid").read_text())
    while not (folder / "socket").exists():
        assert _processor_s(server) < _START_S, f"the warm process has not begun in {_START_S:g} s of processor time"
        time.sleep(0.01)
    _folders.append(folder)
    return folder


@cache
def launch(source: Path = ROOT / "src") -> Path:
    """Starts a server of warm programs, and returns their folder before the server is ready."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    real = Path(PYTHON)
    names = {"python": real, "headrace": real.with_name("headrace"), "torchrun": real.with_name("torchrun")}
    for name, program in names.items():
        # -S: without the libraries, of which it needs none.
        text = f"#!{real} -IS\n{_CLIENT.read_text(encoding='utf-8')}\n\nmain({str(folder)!r}, {str(program)!r})\n"
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {**os.environ, **_WITHOUT_THREADS, **_LARGE_PAGES, **_HASHES, "PYTHONPATH": str(source)}
    # Seconds to import, and other trees' programs use none of it.
    left_out = () if source == ROOT / "src" else ("datasets", "transformers")
    command = [real, "-P", _SERVER, folder, *left_out]
    _servers[folder] = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    (folder / "pid").write_text(str(_servers[folder].pid))
    atexit.register(_end, _servers[folder], folder)
    return folder


def join(folder: Path) -> None:
    """Lets `programs` return a folder whose server another process has started, and ends."""
    _joined.append(folder)


def real(pid: int) -> int:
    """Returns the process that a warm program is, for the process that stands in for it; any other is itself."""
    for folder in _folders:
        try:
            return int(os.readlink(folder / "processes" / str(pid)))
        except FileNotFoundError:
            continue
    return pid


def _processor_s(pid: int) -> float:
    """Returns the processor time that a process has used; one that has ended fails an assertion."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        state, numbers = "X", []
    assert state not in "XZ", "the warm process has ended; what it wrote says why"
    return (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    if not (folder / "socket").exists():
        server.kill()  # nothing has used it, and importing torch to the end takes seconds
    server.communicate()
    shutil.rmtree(folder)

"""A warm program behaves as Python does for the process that starts it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from warm.programs import PYTHON, ROOT, programs, real

pytestmark = pytest.mark.slow

ASK = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path[:2], os.getcwd(), dict(os.environ), sys.stdin.read(),
                  sorted(map(int, os.listdir("/proc/self/fd")))[:3], os.getsid(0) == os.getpid(),
                  sys.modules["__main__"].__dict__ is globals(), "torch" in sys.modules]))
sys.stderr.write("said")
"""
ENDS = {
    "well": "",
    "by a number": "raise SystemExit(7)",
    "by a message": "import sys; sys.exit('no')",
    "by an error": "def fail():\n  1 / 0\nfail()",
    "by a signal": "import os; os.kill(os.getpid(), 9)",
    "by Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "after its threads": "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('first'))).start()",
}


def environment(**changes: str) -> dict[str, str]:
    """Returns that of this process as it is now; modules that are imported while tests are collected change it."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), **changes}


def start(*command: object, **how: object) -> subprocess.Popen[str]:
    return subprocess.Popen([programs() / "python", *map(str, command)], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            **{"env": environment(), **how})  # type: ignore[call-overload, no-any-return]  # fmt: skip


def asked(*command: object, python: Path, **how: object) -> list[object]:
    done = subprocess.run([python, *map(str, command)], input="given", capture_output=True, text=True, check=True,
                          **{"env": environment(), **how})  # type: ignore[call-overload]  # fmt: skip
    assert done.stderr == "said"
    return list(json.loads(done.stdout))


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["-c", "file", "-m"])
def test_it_sees_what_it_was_given(form: str, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASK)
    command = {"-c": ["-c", ASK], "file": ["asks.py"], "-m": ["-m", "asks"]}[form]
    seen = [
        asked(*command, "one", "--two", python=python, cwd=tmp_path) for python in (programs() / "python", Path(PYTHON))
    ]
    (*warm, warm_torch), (*cold, cold_torch) = seen
    assert (warm_torch, cold_torch) == (True, False)
    warm[7] = cold[7]  # a session of its own
    added = {name: value for name, value in warm[4].items() if name not in cold[4]}  # type: ignore[attr-defined]
    assert all(name.startswith(("KMP_", "TORCH")) for name in added), "what torch adds when it is imported"
    warm[4] = {name: value for name, value in warm[4].items() if name not in added}  # type: ignore[attr-defined]
    assert warm == cold


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_python_does(code: str) -> None:
    cold = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    process = start("-c", code)
    assert (*process.communicate(timeout=30), process.returncode) == (cold.stdout, cold.stderr, cold.returncode)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_is_ended_with_whom_the_signal_meets(number: signal.Signals) -> None:
    process = start("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    ending = os.pidfd_open(pid)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number
    assert select.select([ending], [], [], 30)[0], f"process {pid} lives on"
    os.close(ending)


@pytest.mark.parametrize("change", [{"OMP_PROC_BIND": "true"}, {"PYTHONHASHSEED": "7"}], ids=str)
def test_what_counts_when_a_library_is_loaded_is_left_to_python(change: dict[str, str]) -> None:
    code = "import os, sys; print('torch' in sys.modules, os.environ[sys.argv[1]])"
    (name,) = change
    process = start("-c", code, name, env=environment(**change))
    assert process.communicate(timeout=30)[0] == f"False {change[name]}\n"


def test_another_package_of_that_name_is_left_to_python(tmp_path: Path) -> None:
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "__init__.py").write_text("print('another')")
    process = start("-c", "import headrace", cwd=tmp_path)
    assert process.communicate(timeout=30)[0] == "another\n"


def test_what_a_program_starts_is_warm_and_hears_it() -> None:
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    process = start("-c", code, "import sys; sys.exit(5 if 'torch' in sys.modules else 6)")
    assert process.communicate(timeout=30)[0] == "5\n"


def test_the_process_that_a_program_is_can_be_found() -> None:
    process = start("-c", "import os; print(os.getpid(), flush=True); input()")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert real(process.pid) == pid != process.pid
    assert real(os.getpid()) == os.getpid()
    process.communicate("", timeout=30)


def test_the_number_of_threads_is_honoured() -> None:
    code = "import sys, torch; sys.exit(torch.get_num_threads())"
    for threads in (1, 3):
        process = start("-c", code, env=environment(OMP_NUM_THREADS=str(threads)))
        process.communicate(timeout=30)
        assert process.returncode == threads


def test_a_client_that_is_killed_before_it_says_anything_ends_no_other() -> None:
    """As a test that kills a program at once does on a busy machine."""
    folder = programs()
    for _ in range(3):
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(str(folder / "socket"))
        silent.close()
    process = start("-c", "import sys; sys.exit(5 if 'torch' in sys.modules else 6)")
    process.communicate(timeout=30)
    assert process.returncode == 5

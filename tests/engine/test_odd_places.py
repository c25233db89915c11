"""`fit` from a command line, a prompt, a script without a guard, a notebook's cell."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from engine.victims import make_job
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UnfitMachine, UsageError

pytestmark = pytest.mark.slow

TEXT = """
import torch
import headrace as hr

SCALE = 2.0

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def forward(self, inputs):
        return scaled(self.layer(inputs))

def scaled(tensor):
    return SCALE * tensor

class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.full((1,), 2.0 * index)

job = hr.Job(
    model=Net, loss=lambda output, target: (output - target).square().mean(), data=Examples(),
    optimizer=lambda named: torch.optim.SGD(named, lr=1e-3), global_batch_size=4, epochs=2,
)
run = hr.fit(job, hr.Mirrored(2))
assert type(run.model) is Net
print("trained by", run.plan.workers, "workers,", run.status)
"""
MANY_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
SAID = "trained by 2 workers, ok"


def run(folder: Path, *arguments: str, typed: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], input=typed, capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TEXT)
    assert SAID in run(tmp_path, "script.py").splitlines()


def test_a_process_with_more_open_files_than_select_takes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MANY_FILES + TEXT)
    assert run(tmp_path, str(script)).endswith(SAID + "\n")


def test_a_prompt(tmp_path: Path) -> None:
    """Classes that were typed have no file to be found in."""
    statements = [ast.unparse(statement).splitlines() for statement in ast.parse(TEXT).body]
    typed = "\n\n".join("\n".join(filter(None, lines)) for lines in statements) + "\n\n"
    assert SAID in run(tmp_path, "-i", "-q", typed=typed)


CELLS = """
import sys, types
cells = types.ModuleType("__main__")
sys.modules["__main__"] = cells
first, second = {text!r}.split("job = ")
exec(compile(first, "<cell 1>", "exec"), vars(cells))
exec(compile("job = " + second, "<cell 2>", "exec"), vars(cells))
"""


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    assert SAID in run(tmp_path, "-c", CELLS.format(text=TEXT)).splitlines()


@pytest.mark.parametrize("run_dir", [None, "relative"])
def test_a_working_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str | None
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UnfitMachine, match="working directory of this process was deleted"):
        hr.fit(make_job(), hr.Mirrored(2), run_dir=run_dir)


def test_what_lies_in_the_users_folder_does_not_stand_in_for_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    with LocalEngine() as engine:
        assert hr.fit(make_job(), engine=engine).status == "ok"


def test_one_engine_runs_one_thing_at_a_time(engine: LocalEngine) -> None:
    def meanwhile(event: object) -> None:
        hr.fit(make_job(), hr.Mirrored(2), engine=engine)

    with pytest.raises(UsageError, match="this engine runs something already; wait for its end, or give each run"):
        hr.fit(make_job(), hr.Mirrored(2), engine=engine, on_event=meanwhile)
    assert hr.fit(make_job(), hr.Mirrored(2), engine=engine).status == "ok"


def test_an_engine_that_is_closed() -> None:
    engine = LocalEngine()
    engine.close()
    with pytest.raises(UsageError, match="this engine is closed; make another one"):
        hr.fit(make_job(), engine=engine)


def test_many_engines_at_the_same_time(engine: LocalEngine) -> None:
    with LocalEngine() as another:
        seen: list[str] = []

        def meanwhile(event: object) -> None:
            if not seen:
                seen.append(hr.fit(make_job(), hr.Mirrored(2), engine=another).status)

        assert hr.fit(make_job(), hr.Mirrored(2), engine=engine, on_event=meanwhile).status == "ok"
        assert seen == ["ok"]

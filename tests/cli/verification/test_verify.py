"""`headrace verify` on the command line: jobs, scripts, exit codes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from headrace.cli import run

Capture = pytest.CaptureFixture[str]

JOB = """
import functools, torch, headrace as hr

def job(reduction="mean"):
    torch.manual_seed(0)
    data = torch.randn(40, 4), torch.randint(0, 3, (40,))
    loss = torch.nn.CrossEntropyLoss(reduction=reduction)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model = functools.partial(torch.nn.Linear, 4, 3)
    return hr.Job(model=model, loss=loss, optimizer=optimizer, data=data, global_batch_size=8, epochs=2)
"""

SCRIPT = """
import os, sys, torch, headrace as hr
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(20, 4).double(), torch.randn(20, 1).double()), batch_size=8)
model, optimizer, loader = hr.setup(model, optimizer, loader, strategy=sys.argv[1])
for epoch in range(100):
    for inputs, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), target)
        (loss * (2 if "RANK" in os.environ and sys.argv[2] == "other" else 1)).backward()
        optimizer.step()
raise SystemExit("the script was not ended")
"""

LOOP = """
import functools, sys, torch, headrace as hr

def train(worker):
    for inputs, target in worker.batches():
        scale = 2 if worker.world > 1 and sys.argv[1] == "other" else 1
        worker.backward(scale * torch.nn.functional.mse_loss(worker.model(inputs), target))
        worker.update()

if __name__ == "__main__":
    data = torch.randn(40, 4), torch.randn(40, 1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    model, loss = functools.partial(torch.nn.Linear, 4, 1), torch.nn.functional.mse_loss
    job = hr.Job(model=model, loss=loss, optimizer=optimizer, data=data, global_batch_size=8, epochs=2)
    if sys.argv[1] != "nothing":
        hr.launch(train, job, "mirrored" if sys.argv[1] == "named" else hr.Mirrored(workers=2))
        print("the script was not ended")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


@pytest.mark.slow
def test_a_job_is_equal_or_not_and_the_exit_code_says_so(folder: Path, capfd: Capture) -> None:
    assert run(["verify", "job.py", "--workers", "2", "--rounds", "2", "--html", "verify.html"]) == 0
    assert "page: verify.html" in capfd.readouterr().out
    assert "Compared" in (folder / "verify.html").read_text()
    assert run(["verify", "job.py", "--workers", "2", "--rounds", "2", "--set", "reduction=sum", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["equal"]
    assert "the job's loss" in found["cause"]


@pytest.mark.slow
def test_a_script_is_run_alone_and_launched(folder: Path, capfd: Capture) -> None:
    assert run(["verify", "script.py", "--workers", "2", "--json", "central_storage", "same"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["what"] for row in found["rows"]] == ["parameters", "parameters, rank 1 and 0"]
    assert (found["rounds"], found["batch"], found["precision"]) == (6, 8, "double")
    assert found["seconds"] > 0
    assert run(["verify", "script.py", "--workers", "2", "mirrored", "other"]) == 1
    assert "parameters: differs from round 0 on" in capfd.readouterr().out


@pytest.mark.slow
def test_a_script_that_launches_a_loop_is_verified_in_the_place_of_its_call(folder: Path, capfd: Capture) -> None:
    assert run(["verify", "loop.py", "--rounds", "2", "--workers", "2", "--json", "named"]) == 0
    said = capfd.readouterr()
    assert "not ended" not in said.out + said.err
    found = json.loads(said.out)
    assert (found["strategy"], found["workers"], found["rounds"]) == ("mirrored", 2, 2)
    assert found["notes"] == ["compared: the first call of hr.fit or hr.launch; the script ended there"]
    assert run(["verify", "loop.py", "--rounds", "2", "other"]) == 1
    assert "losses: differs from round 0 on" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "3", "loop.py", "same"], "--workers 3, and the script asks for 2; leave it out"),
        (["loop.py", "nothing"], "loop.py calls neither hr.setup nor hr.fit or hr.launch"),
    ],
)
def test_a_script_that_asks_for_something_else(folder: Path, capfd: Capture, options: list[str], said: str) -> None:
    assert run(["verify", *options]) == 1
    assert said in capfd.readouterr().err


def test_a_script_that_is_killed_leaves_no_folder(
    folder: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    kills = "loss=lambda output, target: os.kill(os.getpid(), 9)"
    script = JOB.replace("loss=loss", kills).replace("def job", "def made")
    Path("killed.py").write_text(f"import os\n{script}\nhr.fit(made())\n")
    assert run(["verify", "killed.py"]) == 1
    assert "killed.py, alone: killed by signal 9 (SIGKILL)" in capfd.readouterr().err
    assert list(temporary.glob("headrace-*")) == []


def test_what_cannot_be_verified_is_refused(folder: Path, capsys: Capture) -> None:
    assert run(["verify", "script.py", "--double"]) == 2
    assert "--double: for a job, and this file is a script" in capsys.readouterr().err
    assert run(["verify", "jop.py"]) == 2
    assert "did you mean job.py" in capsys.readouterr().err
    assert run(["verify", "job.py", "--rounds", "1"]) == 2

"""What `headrace adopt` refuses before it runs anything, and what it says of a script that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from api.adoption.scripts import PLAIN
from headrace.cli import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[..., str]:
    """Adopts a script, which is refused; returns what is said."""
    monkeypatch.chdir(tmp_path)

    def adopt(text: str, *arguments: str) -> str:
        Path("train.py").write_text(text)
        assert run(["adopt", "train.py", *arguments]) == 2
        return capsys.readouterr().err

    return adopt


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "import torch\n\ntorch.distributed.init_process_group('gloo')\n",
            "line 3: torch.distributed.init_process_group",
        ),
        ("model = DDP(model)\n", "line 1: DDP(...) makes the script one of several processes already; take it out"),
        ("import headrace as hr\nhr.setup(1, 2, 3)\n", "line 2: hr.setup is called, so it is one of headrace already"),
        ("def f(:\n", "line 1: invalid syntax; a script must be Python"),
        ("import headrace as hr\n\n\ndef job():\n    return hr.Job()\n", "defines a job: train it by `headrace train"),
    ],
)
def test_a_script_that_is_none_for_one_device_is_refused(told: Callable[..., str], text: str, says: str) -> None:
    assert says in told(text)
    assert [path.name for path in Path().iterdir()] == ["train.py"]


def test_an_option_of_the_script_is_the_scripts(told: Callable[..., str]) -> None:
    said = told("'--workers'\n", "--workers", "3")
    assert "train.py has an option --workers of its own, as headrace adopt has" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(3)\n", "train.py itself ended with exit code 3"),
        ("print(input('name? '))\n", "EOFError"),
        ("print('nothing')\n", "it makes no backward pass, so nothing is trained"),
    ],
)
def test_a_script_that_does_not_train_is_told(told: Callable[..., str], text: str, says: str) -> None:
    assert says in told(text)


@pytest.mark.slow
@pytest.mark.full
def test_a_file_that_exists_is_left(told: Callable[..., str]) -> None:
    Path("train_job.py").write_text("mine")
    assert "train_job.py exists; delete it, or give --output another name" in told(PLAIN)
    assert Path("train_job.py").read_text() == "mine"

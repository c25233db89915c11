"""Options that would change nothing beside the others are refused, and nothing is started."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run
from headrace.spec.options import Checkpoints

Capture = pytest.CaptureFixture[str]
FILES = Path(__file__).resolve().parents[2] / "examples" / "simulate"
SIMULATE = f"simulate {FILES / 'model.toml'} --cluster {FILES / 'cluster.toml'}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train digits.py --checkpoint-every 0 --keep 5", "--keep: --checkpoint-every 0 saves nothing"),
        ("train digits.py --checkpoint-every 0 --snapshots-every 5s", "--snapshots-every: --checkpoint-every 0 saves"),
        ("train digits.py --snapshots-every 5s", "--snapshots-every: for parameter servers without backups, and one_"),
        ("train digits.py --secret-file secret", "--secret-file: for processes that a launcher starts"),
        ("train digits.py --cluster ray://auto --predict model.json", "--predict: it simulates the machines of a file"),
        (
            "compare digits.py --strategies mirrored(workers=2) --workers 4",
            "--workers 4: mirrored(workers=2) runs on 2",
        ),
        (f"{SIMULATE} --strategy one_device --workers 4", "--workers 4: one_device runs on 1; try --strategy mirrored"),
        (f"{SIMULATE} --strategy mirrored(workers=2) --workers 4", "--workers 4: mirrored(workers=2) runs on 2; say"),
        (f"{SIMULATE} --assume seed=1 --assume seed=2", "the assumption seed is given twice"),
        ("rehearse digits.py --strategy one_device --workers 4", "--workers 4: one_device runs on 1"),
        ("rehearse digits.py --strategy downpour --seed 1 --assume seed=2", "the assumption seed is given twice"),
        ("rehearse digits.py --from runs/a --workers 4", "--workers: the run of --from has its own; leave it out"),
        ("data profile digits.py --check-deterministic --seconds 2 --workers 1", "--workers, --seconds: for measurem"),
        ("data profile digits.py --check-deterministic --device cpu", "--device: for measurements, and --check-determ"),
        ("bench --set lr=1", "--set: for a job; name its file"),
        ("bench --only matrix --folder there", "--folder: for storage, which --only leaves out"),
        ("doctor --set lr=1", "--set: for a job; name its file"),
        ("doctor --ssh rsh", "--ssh: for the hosts of --cluster"),
        ("serve model --replicas 2", "--replicas: for a Ray cluster; say which by --cluster ray://auto"),
        ("serve model --cluster ray://auto --drain-s 9", "--drain-s: for this machine alone"),
        (
            "serve model --public --token-file token",
            "--public lets every machine ask without a token, and there is one",
        ),
        ("watch runs/a --public --token-file token", "--public lets every machine ask without a token, and there is"),
        ("launch-files slurm digits.py --image a --claim b", "--image, --claim: a file for slurm has no place for it"),
        ("launch-files torchrun digits.py --cores 2 --save-s 9", "--cores, --save-s: a file for torchrun has no place"),
        ("launch-files torchrun digits.py --memory-gb 2 --time 1", "--memory-gb, --time: a file for torchrun has no"),
        ("launch-files kubernetes digits.py --time 1:00", "--time: a file for kubernetes has no place for it"),
    ],
)
def test_what_would_change_nothing_is_refused(
    stage: Any, job_file: Path, line: str, says: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.commands.train.ray_engine", lambda *asked: None)
    Path("token").write_text("a" * 20)
    Path("token").chmod(0o600)
    assert run(shlex.split(line.replace("(", r"\(").replace(")", r"\)"))) == 2
    assert says in capsys.readouterr().err
    assert "fit" not in stage.seen


@pytest.mark.parametrize(
    "line",
    [
        *("launch digits.py", "compare digits.py", "data profile digits.py", "profile digits.py", "verify digits.py"),
        *("rehearse digits.py", "train digits.py --cluster ray://auto --workers 4"),
    ],
)
def test_processes_of_a_launcher_start_no_others(
    stage: Any, job_file: Path, line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run(line.split()) == 2
    assert "starts its own processes; run it without torchrun" in capsys.readouterr().err
    assert stage.seen == []


def test_what_is_asked_of_checkpoints_reaches_a_strategy_that_has_none(stage: Any, job_file: Path) -> None:
    """It is refused by the run, and not left out."""
    unconnected = ["train", "digits.py", "--strategy", "unconnected", "--workers", "2"]
    assert run([*unconnected, "--keep", "5"]) == 0
    assert stage.asked["checkpoints"] == Checkpoints(keep=5)
    assert run(unconnected) == 0
    assert stage.asked["checkpoints"] is None


def test_snapshots_are_of_servers_wherever_these_are(stage: Any, job_file: Path) -> None:
    for strategy in ("parameter_server", "hybrid(outer=downpour(workers=2),inner=pipeline(stages=2))"):
        assert run(["train", "digits.py", "--strategy", strategy, "--snapshots-every", "5s"]) == 0
        assert stage.asked["checkpoints"] == Checkpoints(snapshots_every_s=5.0)

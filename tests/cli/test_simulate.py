"""`headrace simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import run

Capture = pytest.CaptureFixture[str]
FILES = Path(__file__).resolve().parents[2] / "examples" / "simulate"
COMMAND = ["simulate", str(FILES / "model.toml"), "--cluster", str(FILES / "cluster.toml")]
QUICK = ["--assume", "steps=20"]


def test_a_text_for_people(capsys: Capture) -> None:
    assert run([*COMMAND, "--strategy", "parameter_server(workers=16,servers=1)", *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated   parameter_server, 16 workers, 1 server\n")
    assert "bottleneck  the server's network card" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_document_for_programs(capsys: Capture) -> None:
    assert run([*COMMAND, "--strategy", "mirrored", "--workers", "16", "--json", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["simulated"], document["workers"], document["global_batch_size"]) == (True, 16, 1024)
    assert 0 < document["efficiency"] < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--assume", "network_shar=0.5"], "did you mean 'network_share'"),
        (["--assume", "network_share"], "--assume takes KEY=VALUE"),
        (["--assume", "network_share=fast"], "takes a number, got 'fast'"),
        (["--strategy", "miror"], "did you mean 'mirrored'"),
        (["--workers", "64"], "64 workers need as many devices, and the cluster has 32"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, capsys: Capture) -> None:
    assert run([*COMMAND, *QUICK, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_lacks_something_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "model.toml").write_text("parameters = 5")
    assert run(["simulate", str(tmp_path / "model.toml"), *COMMAND[2:]]) == 2
    assert "model.toml: nothing says how long a step takes" in capsys.readouterr().err

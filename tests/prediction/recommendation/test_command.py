"""The command that runs what was recommended: its words, and how they are cut into lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from headrace.cli.commands.recommend import _command, _own_settings, _shell_lines
from headrace.prediction.recommendation.recommend import Recommendation
from headrace.spec.cluster import Cluster, Host


def test_a_command_on_several_hosts_starts_the_servers_too(tmp_path: Path) -> None:
    prediction, candidate = SimpleNamespace(servers=2), SimpleNamespace(devices=3)
    winner = SimpleNamespace(text="parameter_server", hosts=("h0", "h1"), prediction=prediction, candidate=candidate)
    found = cast("Recommendation", SimpleNamespace(winner=winner))
    words = _command(
        found,
        Path("job.py"),
        Cluster(tuple(Host(f"h{index}", 1, 1 << 30) for index in range(3))),
        tmp_path / "none.toml",
        ["a=1"],
    )
    trained = ["job.py", "--strategy", "parameter_server", "--set", "a=1"]
    assert words == ["headrace", "launch", "--hosts", "h0,h1", "--workers", "5", *trained]


def test_micro_batches_of_the_job_give_way_to_those_of_the_winner() -> None:
    assert _own_settings(1, 1, ["lr=1"]) == ["lr=1"]
    assert _own_settings(2, 2, ["options.accumulate=2"]) == ["options.accumulate=2"]
    assert _own_settings(4, 2, ["options.accumulate=2", "lr=1"]) == ["lr=1", "options.accumulate=4"]
    assert _own_settings(1, 2, []) == ["options.accumulate=1"]


def test_a_long_command_is_cut_between_its_options() -> None:
    strategy = "hybrid(outer=mirrored(workers=16), inner=pipeline(stages=4, micro_batches=16))"
    words = ["headrace", "launch", "--cluster", "a/b/cluster.toml", "--workers", "64", "job.py"]
    lines = _shell_lines([*words, "--strategy", strategy, "--set", "note=a b"])
    assert lines == [
        "headrace launch --cluster a/b/cluster.toml --workers 64 job.py \\",
        f'    --strategy "{strategy}" \\',
        '    --set "note=a b"',
    ]
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == [*words, "--strategy", strategy, "--set", "note=a b"]

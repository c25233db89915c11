"""What comes of nodes that do not see a run's directory; no cluster is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.ray.stand_in import StandIn, remote
from headrace.engine.ray.agent import RankAgent
from headrace.engine.ray.mirror import FolderMirror


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn.replace(monkeypatch)


def agent_of() -> Any:
    return SimpleNamespace(files=remote(RankAgent.files, None), file=remote(RankAgent.file, None))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)


def test_each_rank_of_a_node_and_each_process_of_a_rank_has_a_folder_of_its_own(ray: StandIn, tmp_path: Path) -> None:
    run_dir, folders = tmp_path / "run", [tmp_path / name for name in ("first", "second", "again")]
    run_dir.mkdir()
    mirror = FolderMirror(run_dir)
    for rank, folder in enumerate(folders[:2]):
        write(folder / "events" / f"rank-{rank}.jsonl", f"of {rank}\n")
        mirror.follow(rank, agent_of(), str(folder))
    mirror.finish(1.0)
    write(folders[0] / "events" / "rank-0.jsonl", "more of 0\n")
    write(folders[2] / "events" / "rank-1.jsonl", "of the second 1\nnot who")
    mirror.follow(1, agent_of(), str(folders[2]))
    mirror.finish(1.0)
    assert (run_dir / "events" / "rank-0.jsonl").read_text() == "of 0\nmore of 0\n"
    assert (run_dir / "events" / "rank-1.jsonl").read_text() == "of 1\nof the second 1\n"


def test_a_file_that_grows_comes_part_by_part(ray: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.ray.mirror._ASK_EVERY_S", 0.0)
    run_dir, folder = tmp_path / "run", tmp_path / "there"
    run_dir.mkdir()
    mirror = FolderMirror(run_dir)
    mirror.follow(0, agent_of(), str(folder))
    for number in range(4):
        write(folder / "events" / "rank-0.jsonl", f"{number}\n")
        mirror.look()
    mirror.finish(1.0)
    assert (run_dir / "events" / "rank-0.jsonl").read_text() == "0\n1\n2\n3\n"


def test_the_last_line_of_a_log_comes_at_the_end_though_no_newline_follows(ray: StandIn, tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "there"
    run_dir.mkdir()
    write(folder / "logs" / "rank-0.log", "begins\nAborted (core dumped)")
    mirror = FolderMirror(run_dir)
    mirror.follow(0, agent_of(), str(folder))
    mirror.finish(1.0)
    assert (run_dir / "logs" / "rank-0.log").read_text() == "begins\nAborted (core dumped)"


def test_the_runs_own_directory_is_not_copied_to_itself(ray: StandIn, tmp_path: Path) -> None:
    write(tmp_path / "events" / "rank-0.jsonl", "once\n")
    mirror = FolderMirror(tmp_path)
    mirror.follow(0, agent_of(), str(tmp_path))
    mirror.finish(1.0)
    assert (tmp_path / "events" / "rank-0.jsonl").read_text() == "once\n"


def test_the_rest_comes_where_one_node_is_lost(ray: StandIn, tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "there"
    run_dir.mkdir()
    write(folder / "events" / "rank-1.jsonl", "whole\n")
    write(folder / "model.safetensors", "weights")
    lost = SimpleNamespace(files=remote(ray.fail), file=remote(ray.fail))
    mirror = FolderMirror(run_dir)
    mirror.follow(0, lost, "/gone")
    mirror.follow(1, agent_of(), str(folder))
    mirror.finish(1.0)
    assert (run_dir / "events" / "rank-1.jsonl").read_text() == "whole\n"
    assert (run_dir / "model.safetensors").read_text() == "weights"


def test_an_agent_leaves_no_folder_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kills an actor, so that nothing of it runs at its end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    agent = RankAgent()
    folder = Path(agent.folder("/nowhere", "mark"))
    assert folder.is_dir()
    agent.close()
    assert not folder.exists()
    assert agent._process._child.poll() is not None

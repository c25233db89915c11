from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from headrace.cli.options import default_run_dir, job_name, saying_where, tensorboards
from headrace.errors import PeerLost, UsageError
from headrace.spec.events import Event

NOW = datetime(2026, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("path", "name"), [("digits.py", "digits"), ("examples/fashion_mnist/job.py", "fashion_mnist"), ("/job.py", "job")]
)
def test_a_job_is_called_after_its_file_or_folder(path: str, name: str) -> None:
    assert job_name(Path(path)) == name


def test_runs_have_their_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_run_dir("digits-mirrored", NOW)
    assert first == Path("runs/digits-mirrored-20260304-050607")
    first.mkdir(parents=True)
    assert default_run_dir("digits-mirrored", NOW) == Path("runs/digits-mirrored-20260304-050607-2")


def test_a_failure_says_where_its_files_are(tmp_path: Path) -> None:
    with pytest.raises(PeerLost) as caught, saying_where(tmp_path):
        raise PeerLost(1, "host", "killed")
    assert caught.value.__notes__ == [f"events and logs: {tmp_path}"]


def test_what_failed_before_it_began_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught, saying_where(tmp_path):
        raise UsageError("no")
    with pytest.raises(PeerLost) as lost, saying_where(tmp_path / "never made"):
        raise PeerLost(1, "host", "killed")
    assert [getattr(each.value, "__notes__", []) for each in (caught, lost)] == [[], []]


@pytest.mark.slow
def test_tensorboard_gets_one_log_a_run(tmp_path: Path, events: Callable[..., dict[int, list[Event]]]) -> None:
    pytest.importorskip("tensorboard")
    with tensorboards(tmp_path) as take:
        assert take is not None
        for script in (events("one_device", 1), events("mirrored", 2)):
            for event in [script[-1][0], *script[0], script[-1][1]]:
                take(event)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mirrored-2", "one_device-1"]
    for folder in tmp_path.iterdir():
        (file,) = folder.glob("events.out.tfevents.*")
        assert b"evaluation/accuracy" in file.read_bytes()


def test_without_a_log_dir_no_events_are_read() -> None:
    with tensorboards(None) as take:
        assert take is None

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.runs import check_tensorboard, tensorboards
from headrace.errors import UnfitMachine
from headrace.spec.events import Event


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


def test_where_nobody_wants_events_nobody_reads_them() -> None:
    with tensorboards(None) as take:
        assert take is None


def test_a_missing_tensorboard_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(None)
    with pytest.raises(UnfitMachine, match=r"pip install 'headrace\[tensorboard\]'"):
        check_tensorboard(tmp_path)

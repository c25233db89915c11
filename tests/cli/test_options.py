from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from headrace.cli import COMMANDS, run
from headrace.cli.commands.recommend import seconds_of
from headrace.cli.options import (
    check_strategies,
    checkpoints_of,
    complete_strategies,
    complete_strategy,
    default_run_dir,
    job_name,
    listeners,
    saying_where,
    split_names,
    strategy_names,
)
from headrace.engine.base import Terminated
from headrace.errors import PeerLost, RunFailed, UnknownName, UsageError
from headrace.spec.events import Event

NOW = datetime(2026, 3, 4, 5, 6, 7)


@pytest.mark.slow
def test_the_names_read_from_the_source_are_those_of_the_dict() -> None:
    from headrace.strategies import SHORT_NAMES, STRATEGIES

    assert strategy_names() == tuple(sorted([*STRATEGIES, *SHORT_NAMES]))


def test_names_complete() -> None:
    assert {"central_storage", "mirrored", "one_device"} <= set(complete_strategy(""))
    assert complete_strategy("mirr") == ["mirrored"]
    assert complete_strategy("x") == []


def test_lists_of_names_complete_without_what_is_taken() -> None:
    assert complete_strategies("one_device,mir") == ["one_device,mirrored"]
    assert "mirrored,mirrored" not in complete_strategies("mirrored,")
    assert "mirrored,one_device" in complete_strategies("mirrored,")


def test_an_unknown_strategy_is_refused_with_a_suggestion() -> None:
    check_strategies(["mirrored", "one_device", "diloco(period=50)", "easgd", "local_sgd"])
    with pytest.raises(UnknownName, match="no strategy 'mirored'; did you mean 'mirrored'"):
        check_strategies(["one_device", "mirored"])


def test_lists_of_names() -> None:
    assert split_names("one_device, mirrored") == ("one_device", "mirrored")
    with pytest.raises(UsageError, match="with commas between"):
        split_names("one_device,,mirrored")
    with pytest.raises(UsageError, match="names 'mirrored' 2 times"):
        split_names("mirrored,mirrored")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name, command in COMMANDS.items():
        for hint in get_type_hints(command, include_extras=True).values():
            kind, *settings = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if kind in (float, float | None):
                found += [(name, option) for setting in settings for option in (setting.default, *setting.param_decls)]
    assert {("train", "--timeout-s"), ("serve", "--drain-s"), ("launch-files", "--memory-gb")} <= set(found)
    for name, option in found:
        assert run([name, option, value]) == 2
        assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_times_are_finite() -> None:
    for text in ("nans", "infs", "-infs"):
        with pytest.raises(UsageError, match="--checkpoint-every takes steps"):
            checkpoints_of(text, 3)
        with pytest.raises(UsageError, match="--snapshots-every takes seconds"):
            checkpoints_of(None, 3, text)
    for text in ("nanh", "infd", "1e400min"):
        with pytest.raises(UsageError, match="--deadline takes a time"):
            seconds_of(text)


def test_where_to_go_on_is_said_where_something_is_saved(tmp_path: Path) -> None:
    def notes_of(error: BaseException) -> list[str]:
        with pytest.raises(type(error)) as caught, saying_where(tmp_path):
            raise error
        return getattr(caught.value, "__notes__", [])

    assert notes_of(Terminated()) == []
    (tmp_path / "checkpoints").mkdir()
    assert notes_of(Terminated()) == [f"to go on: --run-dir {tmp_path} --resume"]
    assert notes_of(RunFailed("of its own")) == [f"events and logs: {tmp_path}"]


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


def test_what_failed_before_it_began_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught, saying_where(tmp_path):
        raise UsageError("no")
    with pytest.raises(PeerLost) as lost, saying_where(tmp_path / "never made"):
        raise PeerLost(1, "host", "killed")
    assert [getattr(each.value, "__notes__", []) for each in (caught, lost)] == [[], []]


@pytest.mark.slow
def test_tensorboard_gets_one_log_a_run(tmp_path: Path, events: Callable[..., dict[int, list[Event]]]) -> None:
    pytest.importorskip("tensorboard")
    with listeners(tmp_path, None) as every:
        assert every is not None
        (take,) = every
        for script in (events("one_device", 1), events("mirrored", 2)):
            for event in [script[-1][0], *script[0], script[-1][1]]:
                take(event)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mirrored-2", "one_device-1"]
    for folder in tmp_path.iterdir():
        (file,) = folder.glob("events.out.tfevents.*")
        assert b"evaluation/accuracy" in file.read_bytes()


def test_without_a_log_dir_no_events_are_read() -> None:
    with listeners(None, None) as every:
        assert every is None

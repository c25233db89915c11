import json
import sys
import types
from pathlib import Path
from typing import TextIO, get_args, get_type_hints

import pytest

from headrace.cli import run
from headrace.cli.commands.launch import OPTIONS, launch
from headrace.errors import WorkerFailed

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, tuple[str, ...], int]]:
    """What the fake engine was asked; it exits with the last argument, if that is a number."""
    calls = []

    def launch_script(path: Path, arguments: tuple[str, ...], workers: int, stdout: TextIO) -> int:
        calls.append((path, arguments, workers))
        if arguments[-1:] == ("fail",):
            raise WorkerFailed(1, "host", "KeyError: 3", "Traceback\nKeyError: 3")
        stdout.write("a line of the script\n")
        return int(arguments[-1]) if arguments and arguments[-1].lstrip("-").isdigit() else 0

    module = types.ModuleType("headrace.engine.local.engine")
    vars(module)["launch_script"] = launch_script
    monkeypatch.setitem(sys.modules, "headrace.engine.local.engine", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return calls


@pytest.mark.parametrize(
    ("arguments", "script_gets", "workers"),
    [
        (["train.py"], (), 2),
        (["train.py", "--workers", "3", "--epochs", "5", "-v", "data"], ("--epochs", "5", "-v", "data"), 3),
        (["--workers", "1", "--", "train.py", "--json", "--help"], ("--json", "--help"), 1),
        (["train.py", "--lr=0.1"], ("--lr=0.1",), 2),
    ],
)
def test_the_script_gets_its_arguments(
    launched, arguments: list[str], script_gets: tuple[str, ...], workers: int
) -> None:
    assert run(["launch", *arguments]) == 0
    assert launched == [(Path("train.py"), script_gets, workers)]


def test_an_option_that_both_have_is_the_scripts_behind_it(launched, capsys: Capture) -> None:
    Path("train.py").write_text("parser.add_argument('--workers', type=int)")
    assert run(["launch", "--workers", "3", "train.py", "--workers", "0", "--port=1"]) == 0
    assert run(["launch", "train.py", "--port", "0", "--workers", "0"]) == 2
    assert run(["launch", "--", "train.py", "--workers", "0"]) == 0
    assert launched == [
        (Path("train.py"), ("--workers", "0", "--port=1"), 3),
        (Path("train.py"), ("--workers", "0"), 2),
    ]
    err = " ".join(capsys.readouterr().err.split())
    assert (
        "train.py has an option --workers of its own, as headrace launch has: write launch's before the script" in err
    )
    assert "as in headrace launch --workers 2 train.py --port 0 --workers 0" in err


@pytest.mark.parametrize("typed", [["--wrokers", "3", "train.py"], ["--wrokers=3", "train.py"]])
def test_an_unknown_option_in_front_is_named(launched, typed: list[str], capsys: Capture) -> None:
    assert run(["launch", *typed]) == 2
    assert "no option of headrace launch '--wrokers'; did you mean '--workers'?" in capsys.readouterr().err
    assert launched == []


def test_the_options_that_may_be_the_scripts_are_those_of_launch() -> None:
    declared = get_type_hints(launch, include_extras=True).values()
    parts = [
        vars(part) for each in declared for part in get_args(each) if "param_decls" in getattr(part, "__dict__", ())
    ]
    # Of an option, typer has the first name where others have the default.
    named = [name for part in parts for name in (part["default"], *(part["param_decls"] or ()))]
    assert {name for name in named if str(name).startswith("--")} - {"--help"} == OPTIONS


def test_a_job_file_that_would_train_nothing_is_refused(launched, capsys: Capture) -> None:
    file = Path("job.py")
    defines = '"""A job."""\nimport headrace as hr\n\ndef job(lr=0.1):\n    return hr.Job(lr)\n'
    file.write_text(defines)
    assert run(["launch", "job.py", "--workers", "2", "--strategy", "mirrored"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "job.py defines a job, and as a script it trains nothing" in err
    assert "headrace train job.py --strategy mirrored, or name several hosts" in err
    assert launched == []
    for trains in ("run = hr.fit(job())\n", "if __name__ == '__main__':\n    begin(job())\n"):
        file.write_text(defines + trains)
        assert run(["launch", "job.py"]) == 0
    assert len(launched) == 2


@pytest.mark.parametrize(("code", "exit_code"), [("0", 0), ("3", 3), ("-9", 137)])
def test_the_exit_code_is_the_scripts(launched, code: str, exit_code: int) -> None:
    assert run(["launch", "--", "train.py", code]) == exit_code


def test_its_output_goes_where_it_would_go_alone(launched, capfd: Capture) -> None:
    assert run(["launch", "train.py"]) == 0
    assert capfd.readouterr() == ("a line of the script\n", "")


def test_as_json_stdout_carries_the_result_alone(launched, capfd: Capture) -> None:
    assert run(["launch", "train.py", "--json", "5"]) == 5
    out, err = capfd.readouterr()
    assert json.loads(out) == {"script": "train.py", "workers": 2, "exit_code": 5}
    assert err == "a line of the script\n"


def test_a_script_that_fails(launched, capsys: Capture) -> None:
    assert run(["launch", "train.py", "fail"]) == 1
    assert capsys.readouterr().err == "error: rank 1 on host failed: KeyError: 3\n\nTraceback\nKeyError: 3\n"


def test_a_script_that_is_not_there(launched, capsys: Capture) -> None:
    assert run(["launch", "trian.py"]) == 2
    assert "the script trian.py does not exist; did you mean train.py?" in capsys.readouterr().err
    assert launched == []


dealt: list[str] = []
"""How ranks were to be dealt out over hosts."""

kept: list[bool] = []
"""Whether the others were to go on when a host is lost."""


@pytest.fixture
def over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[tuple[str, str]], tuple[str, ...], int]]:
    """Which hosts were to run which arguments of Python, in how many processes."""
    calls = []
    dealt.clear()
    kept.clear()

    def launch_over_ssh(hosts, command, script, workers, port, ssh, python, distribution, keeps_going) -> int:
        dealt.append(distribution)
        kept.append(keeps_going)
        calls.append((hosts, command, workers))
        return 5

    monkeypatch.setattr(sys.modules["headrace.cli.commands.launch"], "over_ssh", launch_over_ssh)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import headrace")
    (tmp_path / "job.py").write_text("def job(lr=0.1): ...")
    (tmp_path / "c.toml").write_text(
        "".join(f'[[hosts]]\nname = "{name}"\naddress = "10.0.0.{name}"\ncores = 1\nmemory_gb = 1\n' for name in "12")
    )
    return calls


def test_a_script_on_several_hosts(over_ssh) -> None:
    assert run(["launch", "--hosts", "a,b", "train.py", "--epochs", "3"]) == 5
    assert run(["launch", "--cluster", "c.toml", "--hosts", "2", "--workers", "3", "train.py"]) == 5
    assert over_ssh == [
        ([("a", ""), ("b", "")], ("train.py", "--epochs", "3"), 2),
        ([("10.0.0.2", "2")], ("train.py",), 3),
    ]


def test_a_job_on_several_hosts_is_trained(over_ssh) -> None:
    assert run(["launch", "--cluster", "c.toml", "job.py", "--strategy", "mirrored", "--run-dir", "x"]) == 5
    assert run(["launch", "--hosts", "a,b", "job.py"]) == 5
    (hosts, command, workers), (_, unnamed, _) = over_ssh
    assert (hosts, workers) == ([("10.0.0.1", "1"), ("10.0.0.2", "2")], 2)
    assert command[2:] == ("train", "job.py", "--strategy", "mirrored", "--run-dir", "x", "--cluster", "c.toml")
    assert unnamed[2:5] == ("train", "job.py", "--run-dir")


def test_backups_are_dealt_out_over_the_hosts(over_ssh) -> None:
    served = ["job.py", "--strategy", "parameter_server(servers=1, backups=1)"]
    assert run(["launch", "--hosts", "a,b", *served]) == 5
    assert run(["launch", "--hosts", "a,b", "job.py", "--strategy=hybrid(downpour(backups = 1), pipeline(2))"]) == 5
    assert run(["launch", "--hosts", "a,b", "--distribution", "block", *served]) == 5
    assert run(["launch", "--hosts", "a,b", "job.py", "--strategy", "downpour(backups=0)"]) == 5
    assert run(["launch", "--hosts", "a,b", "--distribution", "cyclic", "train.py"]) == 5
    assert dealt == ["cyclic", "cyclic", "block", "block", "cyclic"]


def test_the_others_go_on_where_that_is_asked_for(over_ssh) -> None:
    assert run(["launch", "--hosts", "a,b", "--keep-going", "train.py"]) == 5
    assert run(["launch", "--hosts", "a,b", "train.py"]) == 5
    assert kept == [True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "a,,b"], "--hosts takes names or addresses with commas between them, got 'a,,b'"),
        (["--hosts", "a,-oProxyCommand=x"], "--hosts takes names or addresses"),
        (["--hosts", "a,b,a"], "--hosts names 'a' 2 times"),
        (["--hosts", "1,3", "--cluster", "c.toml"], "there is no host '3' of c.toml; known: 1, 2"),
    ],
)
def test_hosts_that_are_refused(over_ssh, arguments: list[str], said: str, capsys: Capture) -> None:
    assert run(["launch", *arguments, "train.py"]) == 2
    assert said in capsys.readouterr().err
    assert over_ssh == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--port", "3000", "--keep-going"], "--port, --keep-going"), (["--distribution", "cyclic"], "--distribution"),
     (["--ssh", "rsh"], "--ssh"), (["--python", "python3"], "--python"), (["--python", sys.executable], "--python")],
)  # fmt: skip
def test_options_of_hosts_without_hosts_are_refused(
    launched, arguments: list[str], names: str, capsys: Capture
) -> None:
    assert run(["launch", *arguments, "train.py"]) == 2
    assert f"{names}: for workers on several hosts" in capsys.readouterr().err
    assert launched == []
    assert run(["launch", "--", "train.py", *arguments]) == 0


def test_fewer_workers_than_hosts(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert run(["launch", "--hosts", "a,b", "--workers", "1", "train.py"]) == 2
    assert "--workers 1 on 2 hosts: every host needs at least one" in capsys.readouterr().err

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import COMMANDS, app, run

HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]
SLOW_PACKAGES = {"torch", "numpy", "matplotlib", "rich", "sklearn", "cloudpickle"}


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_begins_with_examples_and_fits_80_columns(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], prog_name="headrace")
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert lines[0] == "Examples:"
    assert lines[1].startswith(" ".join(["  headrace", *command]))
    assert max(len(line) for line in lines) <= 80
    assert shown.stdout == CliRunner().invoke(app, [*command, "-h"], prog_name="headrace").stdout
    if command:
        assert "--json" in shown.stdout


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert len(commands) == len(COMMANDS)
    assert [line for line in commands if line.endswith("...") or not line.endswith(".")] == []


def test_defaults_that_help_shows_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "simulate": "How many. Default: as many as the cluster has devices.",
        "recommend": "Default: the job's, or the largest batch of the model's file.",
        "launch-files": "How many processes, also those that are servers. [default: 2; x>=1]",
        "bench": "Usage: headrace bench [OPTIONS] [JOB.py]",
        "calibrate": "Usage: headrace calibrate [OPTIONS] {RUN_DIR}...",
    }
    for command, words in said.items():
        assert run([command, "--help"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


def test_every_example_is_understood() -> None:
    for name in COMMANDS:
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="headrace").stdout
        for line in shown.partition("\n\n")[0].splitlines()[1:]:
            words = line.partition("#")[0].partition("|")[0].split()
            assert words[:2] == ["headrace", name]
            options = [word for word in words[2:] if word.startswith("--") and word != "--"]
            assert [word for word in options if word not in shown] == []


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out.startswith("Examples:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'?\nsee: headrace --help\n"),
        (["train", "job.py", "--stratgy", "x"], "--strategy"),
        (["train"], "Missing argument 'JOB.py'"),
        (["train", "job.py", "--device", "gpu"], "'gpu' is not one of"),
        (["train", "job.py", "--workers", "0"], "Invalid value for '--workers'"),
    ],
)
def test_usage_errors_exit_with_2_and_a_suggestion(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert f"see: headrace{'' if len(arguments) < 2 and arguments[0] != 'train' else ' train'} --help" in err


def test_a_usage_error_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["exit_code"]) == ("UsageError", 2)
    assert "JOB.py" in error["message"]


def test_the_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"headrace": "1.2.3"}.__getitem__)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "headrace 1.2.3\n"


@pytest.mark.slow
def test_help_imports_nothing_slow() -> None:
    """No command's: they are asked in turn, and what is left out by the last was left out by all."""
    program = "import sys; from headrace.cli import run; sys.exit(sum(run(line.split()) for line in sys.argv[1:]))"
    lines = [f"{name} --help" for name in ("", *COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, *lines],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("Examples:\n") == len(lines)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported & SLOW_PACKAGES == set()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_strategies(shell: str) -> None:
    line = "headrace train job.py --strategy mirr"
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": "4"},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = {**os.environ, "_HEADRACE_COMPLETE": f"complete_{shell}", **asked}
    done = subprocess.run(HEADRACE, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert "mirrored" in done.stdout
    assert "one_device" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program = [*HEADRACE, "--show-completion", shell]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert f"complete_{shell}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_in_order(number: signal.Signals, code: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import pathlib, time\ndef job():\n    pathlib.Path('began').touch()\n    time.sleep(60)\n"
    )
    # The job file is read by this command's own process; what stands before it needs no torch.
    program = (
        "import sys, types, contextlib\n"
        "engine = types.ModuleType('headrace.engine.local.engine')\n"
        "@contextlib.contextmanager\n"
        "def local(forks):\n"
        "    try: yield\n"
        "    finally: print('engine ends', file=sys.stderr)\n"
        "engine.LocalEngine = local\n"
        "sys.modules['headrace.engine.local.engine'] = engine\n"
        "from headrace.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "train", "job.py", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(out)["error"]["exit_code"] == code
    # SIGTERM ends it at once: what it has started sees that and follows.
    assert err.startswith("engine ends\nerror: " if number == signal.SIGINT else "error: terminated (SIGTERM)\n")

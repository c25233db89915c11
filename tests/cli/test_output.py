import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headrace import errors as tree
from headrace.cli import main, run
from headrace.cli.output import (
    ExitCode,
    answering,
    error_document,
    exit_code,
    write_document,
    write_error,
)
from headrace.engine.base import Terminated
from headrace.errors import (
    DataError,
    HeadraceError,
    JobError,
    PeerLost,
    UnfitMachine,
    UsageError,
    WorkerFailed,
    user_traceback,
)

JOB = """
import torch, headrace as hr
job = hr.Job(model=lambda: torch.nn.Linear(4, 1), task=hr.tasks.regression(), optimizer=torch.optim.Adam,
             data=(torch.randn(64, 4), torch.randn(64, 1)), global_batch_size=8, epochs=1)
"""


def test_stdout_carries_the_result_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(as_json=True) as answer:
        print("what a job file prints")  # noqa: T201
        answer.document({"a": 1})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err == "what a job file prints\n"


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_goes_to_stderr_and_as_a_document_to_stdout(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, answering(as_json):
        raise DataError("no examples")
    out, err = capsys.readouterr()
    assert ended.value.exit_code == 5
    assert err == "error: no examples\n"
    if as_json:
        assert json.loads(out) == {"error": {"type": "DataError", "message": "no examples", "exit_code": 5}}
    else:
        assert out == ""


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.EMFILE])
def test_what_the_machine_refuses_is_an_error_of_the_environment(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, answering(as_json=True):
        raise OSError(number, os.strerror(number), "there/job.py")
    out, err = capsys.readouterr()
    assert ended.value.exit_code == 3
    assert json.loads(out)["error"]["exit_code"] == 3
    assert err.startswith("error: ")
    assert "there/job.py" in err.splitlines()[0]


def test_an_error_that_is_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(FileNotFoundError), answering(as_json=False):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "there/job.py")


def test_a_name_cannot_command_the_terminal() -> None:
    stream = io.StringIO()
    write_error(stream, DataError("\x1b[2Jdata.csv is empty"))
    assert stream.getvalue() == "error: \ufffd[2Jdata.csv is empty\n"


def test_a_working_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(typer.Exit) as ended, answering(as_json=True):
        pytest.fail("a command has begun where torch would end its process")
    assert ended.value.exit_code == 3
    out, err = capsys.readouterr()
    assert "was deleted; change to one that exists" in err
    assert json.loads(out)["error"]["exit_code"] == 3


@pytest.mark.parametrize("as_json", [True, False])
def test_a_stdout_that_takes_no_more(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(typer.Exit) as ended, answering(as_json) as answer:
            answer.give({"a": 1}, "a")
        assert ended.value.exit_code == 3
        assert capsys.readouterr().err == (
            "error: the result cannot be written to stdout: No space left on device; make room there\n"
        )
        with pytest.raises(typer.Exit) as ended, answering(as_json):
            raise DataError("no examples")
        assert ended.value.exit_code == 5
        assert capsys.readouterr().err == "error: no examples\n"
        # What its buffer still holds goes elsewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_the_command_opens_a_stream_that_its_caller_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "--version"])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(0)
            main()
        except SystemExit:
            code = 0 if os.readlink("/proc/self/fd/0") == os.devnull else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_has_closed(closed: str, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB, encoding="utf-8")
    command = f'"$0" -m headrace train job.py --strategy mirrored --workers 2 --run-dir run {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable], cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirected", "code", "last"), [("", 0, "next: headrace report run"), (">/dev/full", 3, "error: the result")]
)
def test_what_stdout_does_not_take(redirected: str, code: int, last: str, tmp_path: Path) -> None:
    """Characters that the locale lacks, and anything where its disk is full."""
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    command = f'"$0" -m headrace train job.py --run-dir run {redirected}'
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable],
        cwd=tmp_path,
        timeout=120,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert (done.stderr if redirected else done.stdout).splitlines()[-1].startswith(last)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
def test_signals(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, answering(as_json=True):
        raise error
    assert ended.value.exit_code == code
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == code


def test_another_exit_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, answering(as_json=True):
        sys.exit(7)
    assert ended.value.code == 7
    assert capsys.readouterr().out == ""


def test_a_defect_keeps_its_traceback_and_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), answering(as_json=True):
        _ = 1 / 0
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ZeroDivisionError"


def test_stdout_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with answering(as_json=False):
        assert sys.stdout is sys.stderr
    assert sys.stdout is before


def test_a_document_is_json_even_with_nan() -> None:
    stream = io.StringIO()
    write_document(stream, {"loss": float("nan"), "rates": (1.5, float("inf")), "by": {2: None}})
    assert json.loads(stream.getvalue()) == {"loss": None, "rates": [1.5, None], "by": {"2": None}}


def test_a_table_is_80_columns_wide_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(as_json=False) as answer:
        answer.show("word " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert max(len(line) for line in lines) <= 80


TRACEBACK = 'Traceback (most recent call last):\n  File "job.py", line 3, in forward\nValueError: a shape\n'


def written(error: BaseException) -> str:
    stream = io.StringIO()
    write_error(stream, error)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), ExitCode.USAGE),
        (JobError("x"), ExitCode.USAGE),
        (UnfitMachine("x"), ExitCode.ENVIRONMENT),
        (DataError("x"), ExitCode.DATA),
        (PeerLost(1, "host", "killed"), ExitCode.PEER_LOST),
        (tree.NonFiniteLoss(0, 3, float("nan")), ExitCode.RUN_FAILED),
        (WorkerFailed(1, "host", "ValueError: a shape"), ExitCode.RUN_FAILED),
        (WorkerFailed(1, "host", "DataError: ragged", exit_code=5), ExitCode.DATA),
    ],
)
def test_exit_codes(error: HeadraceError, code: int) -> None:
    assert exit_code(error) == code


def test_the_workers_own_traceback_is_the_last_thing() -> None:
    text = written(WorkerFailed(1, "host", "ValueError: a shape", TRACEBACK))
    assert text == f"error: rank 1 on host failed: ValueError: a shape\n\n{TRACEBACK}"


def test_an_error_without_user_code_is_one_line() -> None:
    def ours() -> None:
        raise UsageError("3 workers, 2 ranks; drop --workers")

    with pytest.raises(UsageError) as caught:
        ours()
    assert written(caught.value) == "error: 3 workers, 2 ranks; drop --workers\n"


def test_notes_stand_between_the_message_and_the_traceback() -> None:
    error = WorkerFailed(0, "host", "ValueError: a shape", TRACEBACK)
    error.add_note("events and logs: runs/a")
    lines = written(error).splitlines()
    assert lines[1] == "events and logs: runs/a"
    assert lines[-1] == "ValueError: a shape"


def test_the_cause_is_shown_by_the_users_frames(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import json\n\ndef make():\n    json.loads('{')\n")
    space: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(ValueError, match="Expecting") as raised:
        space["make"]()  # type: ignore[operator]
    job = JobError("the model cannot be built")
    job.__cause__ = raised.value
    text = written(job)
    assert f'File "{file}", line 4, in make' in text
    assert "decoder.py" in text, "library frames below the user's say what was asked of the library"
    assert text.rstrip().splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_a_cause_that_met_no_user_code_is_not_shown() -> None:
    try:
        int("x")
    except ValueError as error:
        cause = error.with_traceback(None)
    assert user_traceback(cause) == ""
    wrapped = DataError("the labels are no numbers")
    wrapped.__cause__ = cause
    assert written(wrapped) == "error: the labels are no numbers\n"


def test_an_error_as_json() -> None:
    error = WorkerFailed(1, "host", "ValueError: a shape", TRACEBACK)
    error.add_note("events and logs: runs/a")
    assert error_document(error, 1) == {
        "error": {
            "type": "WorkerFailed",
            "message": "rank 1 on host failed: ValueError: a shape",
            "exit_code": 1,
            "rank": 1,
            "host": "host",
            "cause": "ValueError: a shape",
            "notes": ["events and logs: runs/a"],
            "traceback": TRACEBACK.rstrip(),
        }
    }
    assert error_document(UsageError("no"), 2) == {"error": {"type": "UsageError", "message": "no", "exit_code": 2}}


def test_signals_have_a_message() -> None:
    assert written(KeyboardInterrupt()) == "error: interrupted (SIGINT)\n"
    assert written(Terminated()) == "error: terminated (SIGTERM)\n"


@pytest.mark.parametrize(
    "file",
    [
        "uvloop/loop.pyx",
        "/usr/lib/python3/dist-packages/torch/nn/modules/module.py",
        "/home/a/.local/lib/python3.11/site-packages/torch/nn/modules/module.py",
    ],
    ids=["compiled", "the system's", "the user's"],
)
def test_frames_of_a_library_are_no_user_code(file: str) -> None:
    program = compile("import json; json.loads('')", file, "exec")
    with pytest.raises(json.JSONDecodeError) as caught:
        exec(program)
    error, frames = caught.value, caught.value.__traceback__
    assert frames is not None
    # Without the frame of this test, which is user code.
    assert user_traceback(error.with_traceback(frames.tb_next)) == ""


@pytest.mark.parametrize(
    "words",
    [
        "plan {}", "profile {} -o x.json", "verify {} --workers 2", "recommend {} --cluster {}",
        "simulate {} --cluster {}", "compare {} --strategies one_device,mirrored", "train {}", "rehearse {}",
        "evaluate {}",
    ],
)  # fmt: skip
def test_a_terminal_is_told_what_begins_before_anything_is_read(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command = words.replace("{}", str(tmp_path / "missing.py")).split()
    assert run(command) == ExitCode.USAGE
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("headrace: ")
    assert first.endswith(" ...")
    assert "missing.py" in last or "see:" in last
    if command[0] != "train":
        run([*command, "--json"])
        assert not capsys.readouterr().err.startswith("headrace: ")

import io
import json
import sys

import pytest
import typer

from headrace.cli.output import answering, write_document
from headrace.engine.termination import Terminated
from headrace.errors import DataError


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

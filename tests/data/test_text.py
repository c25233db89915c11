"""Text: lines and files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.data.pipeline.source import Epoch
from headrace.data.sources import records
from headrace.errors import DataError, UsageError

EPOCH = Epoch(0, 0)


def examples(pipeline: hr.data.Pipeline) -> list[str]:
    return [pipeline.source.example(index, EPOCH) for index in range(len(pipeline.source))]


@pytest.mark.slow
@given(
    st.lists(st.text("aé日 \t\r", max_size=9).filter(lambda line: not line.endswith("\r")), min_size=1, max_size=20),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 30),
)
def test_lines_come_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, ended: bool, chunk: int
) -> None:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    content = end.join(lines) + (end if ended or not lines[-1] else "")
    file.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        pipeline = hr.data.from_text(str(file))
    assert examples(pipeline) == lines
    assert pipeline.source.key(len(lines) - 1) == f"{file}, line {len(lines)}"
    assert examples(hr.data.from_text(str(file), by="file")) == [content]


def test_several_files_and_empty_ones(tmp_path: Path) -> None:
    for name, content in (("a", "1\n2"), ("b", ""), ("c", "3\n\n")):
        (tmp_path / name).write_text(content)
    assert examples(hr.data.from_text(str(tmp_path / "*"))) == ["1", "2", "3", ""]
    assert examples(hr.data.from_text([str(tmp_path / "c"), str(tmp_path / "a")])) == ["3", "", "1", "2"]
    assert examples(hr.data.from_text(str(tmp_path / "*"), by="file")) == ["1\n2", "", "3\n\n"]
    with pytest.raises(DataError, match="0 examples"):
        hr.data.from_text(str(tmp_path / "b"))
    with pytest.raises(UsageError, match="by must be"):
        hr.data.from_text(str(tmp_path / "a"), by="word")


def test_what_is_no_text_is_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\ntw\xfco\nthree\n")
    with pytest.raises(DataError, match=r"/a, line 2 is not UTF-8: byte 0xfc at 2 .*iconv"):
        examples(hr.data.from_text(str(tmp_path / "a")))
    with pytest.raises(DataError, match="/a, line 2 is not UTF-8: byte 0xfc at 6"):
        examples(hr.data.from_text(str(tmp_path / "a"), by="file"))

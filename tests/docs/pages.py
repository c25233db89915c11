"""What stands in the pages of the documentation: their blocks of code, and the running of them.

A page's blocks run in order, in one folder that has the repository's `examples`:

- ```python that begins with `# name.py` is written to that file; any other runs, with what earlier ones defined.
- ```console holds commands after `$ `, and what they print.
- ```text right after a ```python block is what that block prints.
- ```sh, ```toml and others are not run.

Printed lines count as shown where spaces differ at most, and `...` stands for anything. They must come in that order;
lines between them may be left out. Decimal fractions may differ by 0.02, since machines round differently; those with a
unit of time, or that are so many times (`1.2 x`) another, are measured and may differ by any amount. Where the line
above a block is `<!-- measured -->`, all of its numbers may.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from warm.programs import ROOT, programs

__all__ = ["ROOT", "Block", "blocks", "pages", "run_page", "unmatched", "write_files"]

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_FILE = re.compile(r"# ([\w./-]+\.py)\n")
_FRACTION = re.compile(r"\d+\.\d+")
_MEASURED = re.compile(r"\d+(?:\.\d+)?(?= (?:s|ms|x)\b)")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?~?")
"""Also as `headrace bench` prints one that varies."""
_MARK = "<!-- measured -->"
_TOLERANCE = 0.02
_TIMEOUT_S = 280

_INTERPRETER = """
import io, json, sys, traceback, types
from contextlib import redirect_stdout

def main():
    page = sys.modules["__main__"] = types.ModuleType("__main__")
    answers = sys.stdout
    for line in sys.stdin:
        error = ""
        with redirect_stdout(io.StringIO()) as caught:
            try:
                exec(compile(json.loads(line), "page", "exec"), page.__dict__)
            except BaseException:
                error = traceback.format_exc()
        print(json.dumps([caught.getvalue(), error]), file=answers, flush=True)

main()
"""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: after the fence.
        text: between the fences, with a last line end.
        line: of the opening fence, from 1.
        follows: whether nothing but empty lines is between it and the block before.
        measured: whether its numbers may be others on another machine.
    """

    language: str
    text: str
    line: int
    follows: bool
    measured: bool = False


def pages() -> list[Path]:
    """Returns the front page, every page under docs/, and the rest of the repository's prose."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
        *sorted((ROOT / "src").rglob("*.md")),
    ]


def blocks(page: Path) -> list[Block]:
    """Returns a page's fenced blocks in order."""
    found: list[Block] = []
    opened: tuple[str, int, str] | None = None
    body: list[str] = []
    prose, above, measured = True, "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, body, measured = (fence[2], number, fence[1]), [], above == _MARK
        elif opened is not None and fence and not fence[2]:
            indent = len(opened[2])
            text = "".join(f"{row[indent:]}\n" for row in body)
            found.append(Block(opened[0], text, opened[1], not prose, measured))
            opened, prose = None, False
        elif opened is not None:
            body.append(line)
        elif line.strip():
            prose = True
        above = line.strip()
    assert opened is None, f"{page}: the block of line {opened[1] if opened else 0} does not end"
    return found


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows, without running it."""
    for block in blocks(page):
        if block.language == "python" and (named := _FILE.match(block.text)):
            _write(folder / named[1], block.text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def run_page(page: Path, folder: Path) -> int:
    """Runs a page's blocks in a folder and returns how many ran; the first that does not hold fails an assertion."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    environment["PATH"] = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), environment["PATH"]])
    environment["PYTHONPATH"] = str(ROOT / "src")
    ran = 0
    printed: str | None = None
    python = _Python(folder, environment)
    try:
        for block in blocks(page):
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.language == "python" and (named := _FILE.match(block.text)):
                _write(folder / named[1], block.text)
            elif block.language == "python":
                printed = python.run(block.text, where)
                ran += 1
                continue
            elif block.language == "console":
                for command, shown in _commands(block.text):
                    _require(shown, _shell(command, folder, environment, where), where, block.measured)
                    ran += 1
            elif block.language == "text" and block.follows and printed is not None:
                _require(block.text.splitlines(), printed, where)
            printed = None
    finally:
        python.close()
    return ran


def unmatched(shown: Sequence[str], printed: str, measured: bool = False) -> str | None:
    """Returns the first of `shown` that `printed` does not have in its place; None if it has all of them."""
    free = _NUMBER if measured else _MEASURED
    lines = iter(printed.splitlines())
    for wanted in shown:
        if wanted.strip() and not any(_is_like(wanted, line, free) for line in lines):
            return wanted
    return None


def _is_like(wanted: str, line: str, free: re.Pattern[str]) -> bool:
    """Whether a line is as it is shown, where numbers that `free` finds may be any."""
    wanted, line = (" ".join(free.sub("(measured)", text).split()) for text in (wanted, line))
    pieces = [".*" if piece == "..." else _pattern(piece) for piece in re.split(r"(\.\.\.)", wanted)]
    found = re.fullmatch("".join(pieces), line)
    fractions = _FRACTION.findall(wanted)
    return bool(found) and all(
        abs(float(number) - float(given)) <= _TOLERANCE
        for number, given in zip(fractions, found.groups() if found else (), strict=True)
    )


def _pattern(text: str) -> str:
    """Returns the regular expression of a piece of a line, with a group for each fraction."""
    return r"(\d+\.\d+)".join(re.escape(part) for part in _FRACTION.split(text))


def _require(shown: Sequence[str], printed: str, where: str, measured: bool = False) -> None:
    missing = unmatched(shown, printed, measured)
    assert missing is None, f"{where} shows\n    {missing}\nwhich is not there in\n{printed}"


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each command of a console block, its continued lines with it, and what it is shown to print."""
    command, shown = "", []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif command.endswith("\\") and not shown:
            command += f"\n{line}"
        else:
            shown.append(line)
    if command:
        yield command, shown


def _shell(command: str, folder: Path, environment: dict[str, str], where: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{where}: `{command}` ended with {done.returncode}\n{done.stdout}"
    return done.stdout


class _Python:
    """One interpreter for all Python blocks of a page, begun with the first."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, code: str, where: str) -> str:
        """Returns what the code prints."""
        if self._process is None:
            self._process = subprocess.Popen(
                [programs() / "python", "-c", _INTERPRETER],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{where}: the interpreter died"
        printed, error = json.loads(answer)
        assert not error, f"{where}:\n{error}"
        return str(printed)

    def close(self) -> None:
        """Ends the interpreter."""
        if self._process is not None:
            self._process.communicate(timeout=_TIMEOUT_S)

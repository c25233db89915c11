"""Runs the command of an answer, puts what it prints into both of its pages, and draws its picture again.

python docs/answers/measure.py NAME ...    while the machine does nothing else
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_FILE = re.compile(r"^```python\n(# ([\w.-]+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^(```console\n\$ (.*?)\n)(.*?)(?=^```)", re.MULTILINE | re.DOTALL)


def measure(page: Path) -> str:
    """Returns what a page's command prints, in a folder with the files that the page shows."""
    text = page.read_text(encoding="utf-8")
    (shown,) = _SHOWN.finditer(text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for code, file in _FILE.findall(text):
            (folder / file).write_text(code, encoding="utf-8")
        for needed in ("examples", "benchmarks"):
            (folder / needed).symlink_to(ROOT / needed)
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", shown[2]], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout


def main(names: Sequence[str]) -> None:
    """Measures these answers again.

    Raises SystemExit without a name: all of them take a quarter of an hour.
    """
    if not names:
        raise SystemExit(__doc__)
    for name in names:
        printed = measure(HERE / f"{name}.md")
        for page in (HERE / f"{name}.md", HERE.parent / "es" / "answers" / f"{name}.md"):
            text = page.read_text(encoding="utf-8")
            (shown,) = _SHOWN.finditer(text)
            page.write_text(text[: shown.start(3)] + printed + text[shown.end(3) :], encoding="utf-8")
    subprocess.run([sys.executable, HERE / "images" / "draw.py", *names], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])

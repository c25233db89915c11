"""Adopts each script of `tests/scripts/ports` as it is for one device, by the command, and prints what became of it.

.venv/bin/python benchmarks/adopt/main.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from scripts.both_ways import PORTS, lines_of  # noqa: E402

DOUBLE = "torch.set_default_dtype(torch.float64)"
"""The ports are written for double precision, which the tests set from outside."""


def _write(name: str, folder: Path) -> Path:
    lines = lines_of(name)[0]
    place = max(index for index, line in enumerate(lines[:25]) if line.startswith(("import ", "from ")))
    script = folder / f"{name}.py"
    script.write_text("\n".join([*lines[: place + 1], DOUBLE, *lines[place + 1 :]]) + "\n")
    return script


def main(names: list[str]) -> None:
    """Adopts the scripts, or those named."""
    print("| script | becomes | why no job |\n|---|---|---|")
    forms: list[str] = []
    for name in names or sorted(path.stem for path in PORTS.glob("*.py")):
        with TemporaryDirectory() as given:
            folder = Path(given)
            shutil.copy(PORTS.parent / "local_data.py", folder)
            command = [sys.executable, "-m", "headrace", "adopt", "--json", str(_write(name, folder))]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            told = json.loads(ended.stdout)
        form, why = told.get("form", "neither"), told.get("reason") or told.get("error", {}).get("message", "")
        forms.append(form)
        print(f"| {name} | {form} | {why.replace(given, '').replace('|', '/'):.160} |", flush=True)
    print(f"\n{len(forms)} scripts: {', '.join(f'{forms.count(form)} {form}' for form in sorted({*forms}))}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""scripts/aside: what it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def aside(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs it with a registry that has nothing, or with other settings of pip."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HEADRACE_"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "file:///nowhere", **settings}
    command = [ROOT / "scripts" / "aside", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_nothing_is_made_where_nothing_is_named() -> None:
    done = aside()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "aside: name a torch or a Python: --torch 2.14, --python python3.13\n"


def test_an_option_that_it_does_not_have() -> None:
    done = aside("--torhc", "2.14")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "aside: no option --torhc\n")


@pytest.mark.slow
def test_a_registry_without_torch_has_no_newest() -> None:
    done = aside("--torch", "newest")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith("aside: pip finds no newest torch in its registry; name one: --torch 2.14\n")


@pytest.mark.slow
@pytest.mark.every
def test_the_newest_is_what_pips_constraints_allow(tmp_path: Path) -> None:
    page = tmp_path / "simple" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    # Files that are there, and cannot be installed.
    wheels = [page.with_name(f"torch-{version}-py3-none-any.whl") for version in ("1.0.0", "1.1.0", "1.2.0")]
    for wheel in wheels:
        wheel.touch()
    page.write_text("".join(f'<a href="{wheel.as_uri()}">{wheel.name}</a>' for wheel in wheels))
    limits = tmp_path / "constraints.txt"
    limits.write_text("# on this machine\ntorch<1.2\n")
    done = aside(
        "--torch",
        "newest",
        PIP_INDEX_URL=page.parent.parent.as_uri(),
        PIP_CONSTRAINT=str(limits),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode
    assert "aside: installing torch==1.1.0 in " in done.stderr

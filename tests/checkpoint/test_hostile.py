"""Hostile checkpoints are refused at once, in little memory, by name, and nothing else happens."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.hostile import KINDS, STEP
from checkpoint.states import save
from headrace.checkpoint import CheckpointFolder, folder, header
from headrace.errors import CorruptCheckpoint
from headrace.machine.allocator import give_back

MOST_S = 1.0
MOST_BYTES = 64 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "checkpoints"
    for step in (10, 20, STEP):
        save(CheckpointFolder(path), step, keep=3)
    return path


def refused(act: Callable[[], object], where: Path) -> CorruptCheckpoint:
    """Returns the error, which must come in time and within the memory."""
    # Memory that they have freed could be taken without being seen.
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    # The collector would look at all that earlier tests have left, again and again.
    gc.freeze()
    try:
        before, began = peak_bytes(), time.process_time()
        with pytest.raises(CorruptCheckpoint) as caught:
            act()
        took_s = time.process_time() - began
    finally:
        gc.unfreeze()
    assert took_s < MOST_S
    assert peak_bytes() - before < MOST_BYTES
    assert where in (caught.value.path, *caught.value.path.parents)
    assert len(str(caught.value)) < 2000
    return caught.value


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def read_all(folder: CheckpointFolder) -> None:
    checkpoint = folder.open(STEP)
    for rank in checkpoint.ranks:
        checkpoint.read(rank)


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_checkpoint_is_refused_and_the_one_before_is_loaded(sound: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run" / "checkpoints"
    shutil.copytree(sound, path)
    bad = path / f"step-{STEP:08d}"
    KINDS[kind](bad)
    found = CheckpointFolder(path)
    assert found.steps()[-1] == STEP
    refused(lambda: found.open(STEP).verify(), bad)
    refused(lambda: read_all(found), bad)
    newest, wrong = found.latest()
    assert newest is not None
    assert newest.step == 10 if kind == "another checkpoint's folder" else newest.step == 20
    assert len(wrong) == 1


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_the_folder_itself_must_be_one(sound: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "checkpoints"
    path.write_bytes(b"") if what == "a file" else path.symlink_to(sound)
    assert refused(CheckpointFolder(path).steps, path).path == path
    refused(CheckpointFolder(path).latest, path)


@pytest.mark.slow
@pytest.mark.parametrize("most", [2_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_stuffed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    assert folder._MOST_ENTRIES == 100_000
    monkeypatch.setattr(folder, "_MOST_ENTRIES", most)
    for number in range(most + 1):
        (tmp_path / f"step-{number:08d}").touch()
    assert f"{most:,} entries" in refused(CheckpointFolder(tmp_path).latest, tmp_path).reason


AUDIT = """
import sys
from pathlib import Path
from headrace.checkpoint import CheckpointFolder
from headrace.errors import CorruptCheckpoint
from checkpoint.test_hostile import read_all

folders = [CheckpointFolder(Path(line)) for line in sys.stdin.read().split("\\n")]
QUIET = ("os.scandir", "object.__getattr__", "builtins.id", "_thread.", "threading.", "sys._getframe", "gc.")
found = set()
armed = False

def hook(event, arguments):
    if not armed or event.startswith(QUIET):
        return
    if event == "open":
        name, _, flags = arguments
        inside = "/" not in name or name in map(lambda folder: str(folder.path), folders)
        if inside and name != ".." and flags & 0o400000:  # O_NOFOLLOW
            return
    found.add((event, str(arguments)[:200]))

sys.addaudithook(hook)
# Once unwatched, so that what is imported at the first use has been.
folders[0].latest()[0].read(0)
armed = True
refused = 0
for folder in folders[1:]:
    for act in (lambda: folder.open(30).verify(), lambda: read_all(folder), folder.latest):
        try:
            act()
        except CorruptCheckpoint:
            refused += 1
armed = False
print(refused, sorted(found))
"""


LARGE = ("MiB", "50,00", "100,000")
"""Parts of the names of large kinds: what opens and runs files is the same as in their small neighbours."""


@pytest.mark.slow
def test_nothing_outside_is_opened_and_nothing_is_executed(
    request: pytest.FixtureRequest, sound: Path, tmp_path: Path
) -> None:
    full = request.config.getoption("--full")
    kinds = [kind for kind in KINDS if full or not any(part in kind for part in LARGE)]
    assert len(kinds) > 200
    paths = [sound]
    for number, kind in enumerate(kinds):
        paths.append(tmp_path / str(number) / "checkpoints")
        shutil.copytree(sound, paths[-1])
        KINDS[kind](paths[-1] / f"step-{STEP:08d}")
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{AUDIT}"],
        input="\n".join(map(str, paths)), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{2 * len(kinds)} []\n", "")
    assert not Path("/tmp/headrace-was-here").exists()


def test_a_header_above_the_limit_is_refused_however_large_its_file_is() -> None:
    assert header.length(header.MOST_BYTES.to_bytes(8, "little"), 1 << 40) == header.MOST_BYTES
    with pytest.raises(ValueError, match="at most 16,777,216 are allowed"):
        header.length((header.MOST_BYTES + 1).to_bytes(8, "little"), 1 << 40)

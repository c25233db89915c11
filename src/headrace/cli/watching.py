"""The page of a run beside the command that trains it: a process that ends with the command."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.engines import launched_rank

_PROGRAM = "from headrace.cli.watching import main; main()"
_END_S = 5.0


@contextlib.contextmanager
def watching(run_dir: Path, wanted: bool) -> Iterator[None]:
    """Shows a run that is about to begin, and says on stderr where; one process of a launcher does it for all.

    Raises:
        UnfitMachine: a library of the page is not installed.
    """
    if not wanted or launched_rank() not in (None, 0):
        yield
        return
    # Lazily: `--help` needs none of it.
    from headrace.machine.extras import require_extra

    require_extra("watch", "the page")
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(run_dir.absolute())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Ctrl-C is for the training, whose end the page shows.
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Shows the run in the directory that is the argument, until stdin ends, even if its other end was killed."""
    from headrace.watch.application import Access
    from headrace.watch.running import run_watch

    def tell(url: str) -> None:
        print(f"watch the run at {url}", file=sys.stderr, flush=True)  # noqa: T201

    run_watch([Path(sys.argv[1])], Access(), "127.0.0.1", 0, True, tell, sys.stdin.fileno())

"""A job that looks for its run's secret, and where else that can be read. Workers import this module by its name."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

from engine.victims import Faulty
from headrace.shared_memory.control_page import ControlPage

__all__ = ["SECRET", "Snooping", "open_to_others"]

SECRET, FOUND = "secret", "found"
"""Files that it leaves: the secrets of all servers in hexadecimal, one a line; and where they can be read."""


class Snooping(Faulty):
    """The worker that comes to its first step first looks, and does `deed`; there may be one that never has data.

    Args:
        folder: that it leaves its files in.
        deed: see `Faulty`.
    """

    def __init__(self, folder: Path, deed: Callable[[], object]) -> None:
        super().__init__(lambda: self._look(folder, deed), victim=None, when=1)

    def _look(self, folder: Path, deed: Callable[[], object]) -> None:
        try:
            (folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return
        (page,) = [each for each in gc.get_objects() if isinstance(each, ControlPage)]
        secrets = [told.partition("#")[2] for record in page.ranks if (told := record.address.read())]
        (folder / FOUND).write_text("\n".join(open_to_others([bytes.fromhex(each) for each in secrets])))
        part = folder / f"{SECRET}.part"
        part.write_text("\n".join(secrets))
        part.rename(folder / SECRET)
        deed()


def open_to_others(secrets: list[bytes]) -> list[str]:
    """Returns where a secret stands in the command line or the environment of any process."""
    found = []
    for process in Path("/proc").iterdir():
        for name in ("cmdline", "environ") if process.name.isdigit() else ():
            try:
                content = (process / name).read_bytes()
            except OSError:
                continue  # it has ended
            found += [
                f"{process}/{name}" for secret in secrets if secret in content or secret.hex().encode() in content
            ]
    return [*found, *(["os.environ"] if any(each.hex() in os.environ.values() for each in secrets) else [])]

"""File systems for a run directory or shared memory, which fail on demand; as root."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

from storm.failing_disk import ALL, WRITES
from storm.schedule import Fault

__all__ = ["Disk", "FailingDisk"]

DISK_BYTES = 16 << 20
MOUNTED_WITHIN_S = 30.0


class Disk:
    """A small file system in memory.

    Attributes:
        folder: where it is mounted.
        inside: where its content can be read although it fails.
    """

    def __init__(self, folder: Path, size: int = DISK_BYTES) -> None:
        self.folder = self.inside = folder
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "storm", str(folder)], check=True)

    def fail(self, fault: Fault) -> None:
        if fault.kind == "read-only disk":
            # A file that is open for writing forbids `remount,ro` of a mount; the lazy way is that of a failing disk.
            subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=False, capture_output=True)
            return
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def mend(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class FailingDisk:
    """A disk whose operations, all or those that write, give EIO from some moment on; attributes as of `Disk`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._behind = Disk(folder.with_name(f"{folder.name}-behind"))
        self.inside = self._behind.folder
        self._switch = folder.with_name(f"{folder.name}-switch")
        program = str(Path(__file__).with_name("failing_disk.py"))
        self._server = subprocess.Popen(
            [sys.executable, program, str(self.inside), str(folder), str(self._switch)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        give_up = time.monotonic() + MOUNTED_WITHIN_S
        while not folder.is_mount():
            assert self._server.poll() is None, "the server of the failing disk has ended"
            assert time.monotonic() < give_up, f"no failing disk within {MOUNTED_WITHIN_S:.0f} s"
            time.sleep(0.01)

    def fail(self, fault: Fault) -> None:
        if fault.kind == "failing disk":
            new = self._switch.with_suffix(".new")
            new.write_text((WRITES, ALL)[fault.pick % 2])
            new.rename(self._switch)
        else:
            self._behind.fail(fault)

    def mend(self) -> None:
        self._switch.unlink(missing_ok=True)
        self._behind.mend()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        self._server.wait()
        self._behind.close()

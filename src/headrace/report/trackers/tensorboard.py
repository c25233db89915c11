"""A run's events as scalars for TensorBoard, while it runs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.machine.extras import require_extra
from headrace.report.trackers.curves import Tracked, TrackedPicture, TrackedText, TrackedValue
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import RunStarted

_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
"""By a PNG's colour type: grey, RGB, a palette of RGB, grey with alpha, RGBA."""


class TensorBoard(Tracker):
    """Takes events (`fit(..., on_event=TensorBoard("runs/a/tensorboard"))`) and writes them as scalars.

    `loss` by step is the weighted mean over the workers; `seconds/<part>/rank-<n>` where each worker's step went;
    `evaluation/<metric>`; `checkpoints/stall_s` and `checkpoints/bytes` by step; notices, failures and rounds that were
    not finite as text. A resumed run continues the same curves. Where tensorboard is not installed or the folder cannot
    be written, one line says so, and the run goes on without curves.

    Args:
        log_dir: where to; made if missing.
        every_s: seconds between two rounds that are written where rounds are shorter; 0 for every round.
        per_run: gives each run a folder of its own in `log_dir`, `<strategy>-<workers>`, as a comparison needs it.

    Raises:
        UsageError: `every_s` is no number of seconds of at least 0.

    Examples:
        >>> run = hr.fit(job, on_event=hr.TensorBoard("curves"))
    """

    def __init__(self, log_dir: Path | str, every_s: float = 0.25, per_run: bool = False) -> None:
        super().__init__("TensorBoard", every_s)
        # Now, because a run may change the working directory.
        self._log_dir = Path(log_dir).absolute()
        self._per_run = per_run
        self._writer: Any = None

    def begin(self, started: RunStarted) -> None:
        require_extra("tensorboard", "it")
        # Inside, since this room is imported without torch and most users have no tensorboard.
        from torch.utils.tensorboard import SummaryWriter

        folder = self._log_dir / f"{started.strategy}-{started.workers}" if self._per_run else self._log_dir
        # It drops what an earlier attempt wrote of the rounds that are repeated. Not from `resumed_step` on: the
        # evaluation after so many rounds stays, and the loss of that round is the same again.
        purge = started.resumed_step + 1 if started.resumed_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, entries: Sequence[Tracked]) -> None:
        for each in entries:
            match each:
                case TrackedValue():
                    self._writer.add_scalar(each.tag, each.value, each.step, each.time_s)
                case TrackedText():
                    self._writer.add_text(each.tag, each.text, each.step, each.time_s)
                case TrackedPicture():
                    self._writer.file_writer.add_summary(_picture(each), each.step, each.time_s)

    def end(self, status: str) -> None:
        self._writer.close()


def _picture(entry: TrackedPicture) -> Any:
    """Returns the summary of a PNG file, whose bytes TensorBoard shows as they are."""
    # Here, as most users have no tensorboard.
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Path(entry.path).read_bytes()
    width, height, _, colours = struct.unpack_from(">IIBB", content, 16)
    image = Summary.Image(height=height, width=width, colorspace=_CHANNELS[colours], encoded_image_string=content)
    return Summary(value=[Summary.Value(tag=entry.tag, image=image)])

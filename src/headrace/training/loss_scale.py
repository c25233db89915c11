"""The loss scale of fp16: gradients that would vanish in half precision are computed larger, and shrunk again.

Micikevicius et al., "Mixed precision training" (2018), section 3.2, with torch's `GradScaler` defaults. torch's
own decides per process; here all ranks take the same decision from the same sum, so scales never part.
"""

from __future__ import annotations

from collections.abc import Mapping

_START, _GROWTH, _BACKOFF, _GROWTH_EVERY = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """Attributes:
    value: what the loss is multiplied by.
    """

    def __init__(self) -> None:
        self.value = _START
        self._good = 0

    @property
    def inverse(self) -> float:
        """What the gradients are multiplied by."""
        return 1.0 / self.value

    def grow(self) -> None:
        """Notes a round whose gradients were finite."""
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.value, self._good = self.value * _GROWTH, 0

    def shrink(self) -> None:
        """Notes a round whose gradients overflowed."""
        self.value, self._good = self.value * _BACKOFF, 0

    def settings(self) -> dict[str, float]:
        """Returns the state as JSON values."""
        return {"value": self.value, "good": self._good}

    def load(self, settings: Mapping[str, float]) -> None:
        """Takes up a state."""
        self.value, self._good = float(settings["value"]), int(settings["good"])

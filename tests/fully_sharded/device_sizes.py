"""Sizes of the model that `device_runs` trains, also for pytest's process, which has no simulated device."""

from __future__ import annotations

UNITS, WIDTH, ROUNDS, BATCH = 6, 384, 4, 8
UNIT_BYTES = 8 * (WIDTH + 1) * WIDTH

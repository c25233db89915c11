"""Whatever happens to the files of a checkpoint is found, by name, and the one before is loaded."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from checkpoint.damage import complaint, damages, prepare

EVERY = 97
"""benchmarks/checkpoint-corruption/ does 10,000 damages; here every so manieth of them."""


@pytest.mark.slow
def test_every_damage_is_found(tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    prepare(sound)
    kinds: Counter[str] = Counter()
    first = itertools.islice(damages(random.Random(0), sound), 25)
    rest = itertools.islice(damages(random.Random(0), sound), 25, 10_000, EVERY)
    for damage in itertools.chain(first, rest):
        kinds[damage.kind] += 1
        assert complaint(sound, damage, tmp_path / "aside") == ""
    exchanges = {"exchange between checkpoints", "exchange between ranks", "folders exchanged"}
    assert set(kinds) == {"missing", "truncation", "flipped bit", *exchanges}

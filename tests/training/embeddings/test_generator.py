"""First values of rows: the generator's published answers, and rows that depend on nothing but their index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.spec.embedding import RowInit, TableSpec
from headrace.training.embeddings.generator import first_rows, philox

# Random123's kat_vectors: counter and key of zeros, of ones, and digits of pi.
KNOWN = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.full(2, word, dtype=np.uint64) for word in counter)
    assert [[int(each) for each in word] for word in philox((c0, c1, c2, c3), key)] == [[word] * 2 for word in words]


def test_a_row_depends_on_seed_name_and_index_alone() -> None:
    spec = TableSpec("item", 1 << 40, 7, seed=3)
    ids = torch.tensor([0, 5, 1 << 33, (1 << 40) - 1])
    rows = first_rows(spec, ids)
    assert torch.equal(first_rows(spec, ids[[2, 0]]), rows[[2, 0]])
    others = [TableSpec("item", 1 << 40, 7, seed=4), TableSpec("user", 1 << 40, 7, seed=3)]
    assert all((first_rows(other, ids) != rows).any(1).all() for other in others)
    assert len(torch.unique(rows)) == rows.numel()


def test_rows_have_the_distribution_that_was_asked_for() -> None:
    ids = torch.arange(20_000)
    normal = first_rows(TableSpec("a", 20_000, 10, "float64", RowInit("normal", 2.0, 0.5)), ids)
    # 200,000 numbers: the mean is within 5 of its standard errors.
    assert abs(float(normal.mean()) - 2.0) < 5 * 0.5 / 200_000**0.5
    assert abs(float(normal.std()) - 0.5) < 5 * 0.5 / 400_000**0.5
    assert abs(float(((normal - 2.0) / 0.5).pow(4).mean()) - 3.0) < 0.06
    uniform = first_rows(TableSpec("a", 20_000, 10, "float64", RowInit("uniform", -1.0, 3.0)), ids)
    assert -1.0 < float(uniform.min()) < -0.999
    assert 2.999 < float(uniform.max()) < 3.0
    assert abs(float(uniform.mean()) - 1.0) < 5 * 4 / 12**0.5 / 200_000**0.5
    truncated = first_rows(TableSpec("a", 20_000, 10, "float64", RowInit("truncated", 0.5, 2.0, (-2.0, 2.0))), ids)
    assert -2.0 <= float(truncated.min()) < -1.99
    assert 1.99 < float(truncated.max()) <= 2.0
    # The mean of that distribution: 0.5 + 2 (phi(-1.25) - phi(0.75)) / (Phi(0.75) - Phi(-1.25)).
    assert abs(float(truncated.mean()) - 0.1450) < 0.01
    constant = first_rows(TableSpec("a", 5, 3, init=RowInit("constant", 0.25)), ids[:5])
    assert torch.equal(constant, torch.full((5, 3), 0.25))


def test_the_row_of_the_padding_is_zero() -> None:
    rows = first_rows(TableSpec("item", 10, 4, padding=2), torch.arange(4))
    assert (rows[2] == 0).all()
    assert (rows[[0, 1, 3]] != 0).all()

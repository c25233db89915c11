"""One forward, one backward by turns, on ranks that hold several stages each (Narayanan et al. 2021, "Efficient
large-scale language model training on GPU clusters", section 2.2.2, figure 4).

Two ranks with two stages each, 0 and 2 on rank 0, 1 and 3 on rank 1; four micro-batches. a2 is the forward of
micro-batch 2 through a rank's first stage, b2' its backward through its second, each of which takes a unit:

    rank 0   a0  a1  b0  b1  a2  b0' a3  b1' b2  a0' b3  a1' .   b2' .   b3' a2' a3'
    rank 1   .   a0  a1  b0  b0' b1  b1' a2  a0' a3  a1' b2  b2' b3  b3' a2' a3' .

The bubble is that of one stage a rank, (K - 1) / M of the work, divided by the stages a rank; values cross between
ranks as many times more often. The number of micro-batches must be a multiple of that of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 2) -> Iterator[Action]:
    """Yields what a rank does, group by group of as many micro-batches as there are ranks.

    Raises:
        ValueError: `micro_batches` is no multiple of `ranks`.
    """
    if micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {ranks} ranks")
    every = micro_batches * chunks

    def action(index: int, backward: bool) -> Action:
        group, place = divmod(index, ranks * chunks)
        chunk, member = divmod(place, ranks)
        chunk = chunks - 1 - chunk if backward else chunk
        return Action(rank + chunk * ranks, group * ranks + member, backward)

    ahead = min(every, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    for index in range(ahead):
        yield action(index, backward=False)
    for index in range(ahead, every):
        yield action(index, backward=False)
        yield action(index - ahead, backward=True)
    for index in range(every - ahead, every):
        yield action(index, backward=True)

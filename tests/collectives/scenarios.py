"""What the ranks of a test do, each in its own process: `scenario(host, page, ...)`, by name from `play`.

What they return goes through JSON: complaints, numbers, digests.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.collectives.base import HostMap, gather_texts, moved_bytes_of
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.errors import PeerLost, UsageError
from headrace.modules import describe
from headrace.shared_memory.control_page import ControlPage
from headrace.training.clipping import squared_norm
from headrace.training.gradients import UsedParameters
from headrace.training.reduction import BucketReduction, CollectiveReduction, Reduction, SharedMemoryReduction

DTYPES = [
    *[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64],
    *[torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool],
]
SLOT_BYTES = 256 * 1024
NO_DESCRIPTOR = 1 << 20
"""No process has so many."""


def lengths(item_bytes: int) -> list[int]:
    """Returns numbers of elements around every limit: nothing, the direct sum, one slot, several."""
    slot = SLOT_BYTES // item_bytes
    return [0, 1, 3, 16 * 1024 // item_bytes, 16 * 1024 // item_bytes + 1, slot - 1, slot, slot + 1, 2 * slot + 7]


def made(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns the same elements in every process, negative zeros and infinities among those that can have them."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(-100, 100, (length,), generator=generator).to(dtype)
    if dtype.is_floating_point:
        tensor = tensor * torch.rand(length, generator=generator, dtype=torch.float64).to(dtype)
        tensor[::97] = -0.0
        tensor[::101] = float("inf")
    return tensor


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def sum_everything(host: SharedMemoryGroup, page: ControlPage) -> list[str]:
    """Returns where the sum is not, bit for bit, that of all ranks in rank order."""
    wrong = []
    for dtype in DTYPES:
        for length in lengths(dtype.itemsize):
            tensors = [made(length, dtype, seed=length * 10 + rank) for rank in range(host.world)]
            expected = tensors[0].clone()
            for tensor in tensors[1:]:
                expected += tensor
            own = tensors[host.rank]
            host.all_reduce(own)
            if digest(own) != digest(expected):
                wrong.append(f"{dtype} x {length}")
    return wrong


def spread_everything(host: SharedMemoryGroup, page: ControlPage) -> list[str]:
    """Returns where a broadcast has not brought rank 0's bits."""
    wrong = []
    for dtype in DTYPES:
        for length in lengths(dtype.itemsize):
            tensor = made(length, dtype, seed=length + host.rank)
            if dtype.is_floating_point:
                tensor[1::89] = float("nan")
            expected = made(length, dtype, seed=length)
            if dtype.is_floating_point:
                expected[1::89] = float("nan")
            host.broadcast(tensor)
            if digest(tensor) != digest(expected):
                wrong.append(f"{dtype} x {length}")
    return wrong


def add_numbers(host: SharedMemoryGroup, page: ControlPage, counts: list[int]) -> list[list[float]]:
    """Returns the sums of 0.1 * (rank + 1) + index, for several numbers of numbers."""
    return [host.sum([0.1 * (host.rank + 1) + index for index in range(count)]) for count in counts]


def share_regions(host: SharedMemoryGroup, page: ControlPage, sizes: list[int]) -> list[list[int]]:
    """Returns the sizes, the sums before and the sums after everybody wrote its rank + 1 into its own region."""
    regions = host.share(sizes[host.rank])
    before = [int(region.sum()) for region in regions]
    host.barrier()
    regions[host.rank].fill_(host.rank + 1)
    host.barrier()
    after = [int(region.sum()) for region in regions]
    host.barrier()
    return [[len(region) for region in regions], before, after]


def storm(host: SharedMemoryGroup, page: ControlPage, meetings: int) -> list[int]:
    """Meets again and again, late by chance; returns the meetings after which a rank's value was wrong."""
    regions = [region.view(torch.int64).numpy() for region in host.share(16)]
    chance = random.Random(host.rank)
    wrong = []
    for meeting in range(meetings):
        until = monotonic() + chance.choice([0.0, 0.0, 0.0, 0.0, 2e-5, 2e-4])
        while monotonic() < until:
            pass
        # Two words by turns: a peer that is ahead writes the other one.
        regions[host.rank][meeting % 2] = meeting
        host.barrier()
        if any(region[meeting % 2] != meeting for region in regions):
            wrong.append(meeting)
    return wrong


def everything_by_turns(host: SharedMemoryGroup, page: ControlPage, turns: int) -> list[str]:
    """Sums of numbers and tensors, broadcasts, regions and barriers in a random order; returns what went wrong."""
    chance = random.Random(5)
    wrong = []
    for turn in range(turns):
        kind = chance.choice(["numbers", "small", "large", "spread", "share", "barrier"])
        value = float(turn + host.rank)
        total = float(sum(turn + rank for rank in range(host.world)))
        if kind == "numbers":
            right = host.sum([value]) == [total]
        elif kind in ("small", "large"):
            tensor = torch.full((5 if kind == "small" else 70_001,), value)
            host.all_reduce(tensor)
            right = bool((tensor == total).all())
        elif kind == "spread":
            tensor = torch.full((3, 50), value)
            host.broadcast(tensor)
            right = bool((tensor == turn).all())
        elif kind == "share":
            region = host.share(host.rank * 8)
            right = [len(part) for part in region] == [8 * rank for rank in range(host.world)]
        else:
            host.barrier()
            right = True
        if not right:
            wrong.append(f"{kind} at {turn}")
    return wrong


def wait_for_a_lost_rank(host: SharedMemoryGroup, page: ControlPage) -> list[object]:
    """The last rank stays away and says that rank 1 is lost; returns who was lost, and whether it was told at once."""
    if host.rank == host.world - 1:
        page.abort = 2
        return [1, True]
    began = monotonic()
    try:
        host.barrier()
    except PeerLost as error:
        return [error.rank, monotonic() - began < 30.0]
    return [-1, False]


def open_what_a_lost_rank_has_offered(host: SharedMemoryGroup, page: ControlPage, how: str) -> int:
    """The last rank is lost when it has offered memory that is not open yet; returns who was lost."""
    last = host.world - 1
    if host.rank == last:
        page.ranks[last].segment_offer.publish(os.getpid(), NO_DESCRIPTOR, 4096)
        host.barrier()
        page.abort = last + 1
        return last
    try:
        if how == "share":
            host.share(8)
        else:
            host.subgroup([last, *range(last)])
    except PeerLost as error:
        return error.rank
    return -1


def wire_of(host: SharedMemoryGroup, store: str) -> TorchDistributed:
    return TorchDistributed(FileStore(store, host.world), host.rank, host.world, "cpu", timeout_s=60.0)


def between_hosts(host: SharedMemoryGroup, page: ControlPage | None, hosts: Sequence[str] = ()) -> MultiHostGroup:
    """Connects the ranks as if each were on a host of its own; with a page of its own if none is given."""

    def accuse(error: Exception, suspect: int) -> NoReturn:
        raise PeerLost(suspect, "the other host", str(error))

    own = page or ControlPage.create(host.world)
    home = HostMap(tuple(hosts or map(str, range(host.world))), "127.0.0.1")
    return MultiHostGroup(Watch(own, host.check, accuse, 10.0), host.rank, home, partial(gather_texts, host))


def use_the_wire(host: SharedMemoryGroup, page: ControlPage, store: str, apart: bool = False) -> list[str]:
    """Returns which verb of torch.distributed gave the wrong result."""
    wire = between_hosts(host, None) if apart else wire_of(host, store)
    wrong = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        for length in (1, 3, 70_001):
            tensors = [made(length, dtype, seed=rank) for rank in range(host.world)]
            expected = tensors[0] + tensors[1]
            summed, later, spread = (tensors[host.rank].clone() for _ in range(3))
            wire.all_reduce(summed)
            wait = wire.start_all_reduce(later)
            wait()
            wire.broadcast(spread)
            wire.barrier()
            if not torch.equal(summed, expected) or not torch.equal(later, expected):
                wrong.append(f"sum of {dtype} x {length}")
            if digest(spread) != digest(tensors[0]):
                wrong.append(f"broadcast of {dtype} x {length}")
            every = torch.cat(tensors)
            whole, part = torch.zeros_like(every), torch.zeros_like(summed)
            wire.all_gather_into(whole, tensors[host.rank])
            if digest(whole) != digest(every):
                wrong.append(f"gather of {dtype} x {length}")
            wire.reduce_scatter(part, torch.cat([summed, tensors[host.rank]]))
            if not torch.equal(part, expected + expected if host.rank == 0 else expected):
                wrong.append(f"scatter of {dtype} x {length}")
    empty = torch.empty(0, 3)
    wire.all_reduce(empty)
    wire.start_all_reduce(empty)()
    own = torch.tensor([200 + host.rank], dtype=torch.uint8)
    if wire.gather(own).tolist() != [[200], [201]]:
        wrong.append("gather")
    pieces = torch.tensor([[host.rank, to, 255] for to in range(2)], dtype=torch.uint8)
    if wire.all_to_all(pieces).tolist() != [[rank, host.rank, 255] for rank in range(2)]:
        wrong.append("trade")
    if wire.sum([0.1, host.rank]) != [0.1 + 0.1, 1.0]:
        wrong.append("numbers")
    if wire.moved_bytes <= 0:
        wrong.append("count of bytes")
    wire.close()
    return wrong


def meet_between_hosts(
    host: SharedMemoryGroup, page: ControlPage, store: str, missing: list[list[int]]
) -> list[object]:
    """Returns what rank 0 has decided before each meeting, and which of three gradients no rank has."""
    own = ControlPage.create(host.world)
    wire = between_hosts(host, own)
    used = UsedParameters(wire, 3)
    found: list[object] = []
    for turn in range(2):
        used.publish([None if index in missing[host.rank] else torch.ones(1) for index in range(3)])
        if host.rank == 0:
            own.stop_after, own.save_after, own.rate_after = 7 + turn, 2**40, 5 * turn
        found.append([used.settle(), own.stop_after, own.save_after, own.rate_after])
    wire.close()
    return found


def give_and_take(host: SharedMemoryGroup, page: ControlPage) -> list[str]:
    """Returns which lengths did not come as they were given, to all or to one."""
    wrong = []
    for length in lengths(1):
        every = [made(length, torch.uint8, seed=rank) for rank in range(host.world)]
        if not torch.equal(host.gather(every[host.rank]), torch.stack(every)):
            wrong.append(f"gather of {length}")
        pieces = [[made(length, torch.uint8, seed=9 * giver + to) for to in range(host.world)] for giver in range(4)]
        given = host.all_to_all(torch.stack(pieces[host.rank]))
        if not torch.equal(given, torch.stack([pieces[giver][host.rank] for giver in range(host.world)])):
            wrong.append(f"trade of {length}")
        # Rank s sends rank t as many more: none to some, and what it keeps is not sent.
        uneven = [[length * ((s + 2 * t) % 3) for t in range(host.world)] for s in range(host.world)]
        pieces = [[made(n, torch.uint8, seed=9 * s + t) for t, n in enumerate(row)] for s, row in enumerate(uneven)]
        before = host.moved_bytes
        taken = host.all_to_all_uneven(pieces[host.rank], uneven)
        if not all(torch.equal(pieces[giver][host.rank], each) for giver, each in enumerate(taken)):
            wrong.append(f"uneven trade of {length}")
        others = [rank for rank in range(host.world) if rank != host.rank]
        if host.moved_bytes - before != sum(uneven[host.rank][r] + uneven[r][host.rank] for r in others):
            wrong.append(f"bytes of an uneven trade of {length}")
    return wrong


def meet_in_groups(host: SharedMemoryGroup, page: ControlPage, store: str) -> list[object]:
    """Four ranks meet in rows and in columns of a square; returns sums of their ranks, and what they have heard."""
    own = ControlPage.create(host.world)
    whole = between_hosts(host, own) if store else host
    row, column = host.rank // 2 * 2, host.rank % 2
    across, down = whole.subgroup([row, row + 1]), whole.subgroup([column, column + 2])
    if host.rank == 0:
        own.stop_after = 7
    sums: list[object] = []
    for group in (across, down, whole):
        tensor = torch.full((70_001,), float(host.rank))
        group.all_reduce(tensor)
        (number,) = group.sum([host.rank])
        told = torch.tensor([host.rank])
        group.broadcast(told)
        sums.append([group.rank, group.world, float(tensor[0]), float(tensor[-1]), number, int(told)])
    moved = moved_bytes_of(whole) > whole.moved_bytes > 0
    if store:
        sums.append(own.stop_after)
    else:
        regions = down.share(8)
        regions[down.rank].fill_(host.rank)
        down.barrier()
        sums.append([int(region[0]) for region in regions])
    whole.barrier()
    whole.close()
    return [*sums, moved]


def part_between_hosts(host: SharedMemoryGroup, page: ControlPage, store: str, how: str) -> str:
    """Returns what rank 0 hears in a meeting to which rank 1 does not come."""
    wire = between_hosts(host, page)
    wire.barrier()
    if host.rank == 1:
        if how == "ended":
            page.ranks[1].heartbeat.finished = 4
        elif how == "lost":
            page.abort = 2
        while how != "gone" and not page.stop:
            time.sleep(0.01)
        wire.close()
        return ""
    said = ""
    try:
        wait = wire.start_all_reduce(torch.ones(3))
        if how != "forgotten":
            wait()
    except (PeerLost, UsageError) as error:
        said = str(error)
    wire.close()
    page.stop = 1
    return said


def reduce_both_ways(host: SharedMemoryGroup, page: ControlPage, store: str) -> list[str]:
    """Returns where a sum through shared memory is not the one by torch.distributed."""
    wire = wire_of(host, store)
    modules = nn.ModuleList([nn.Linear(30, 7), nn.Linear(7, 5).double(), nn.Linear(5, 1, bias=False)])
    specs = describe(modules).trainable
    ways: list[Reduction] = [
        SharedMemoryReduction(specs, host),
        CollectiveReduction(specs, host, wire, torch.device("cpu")),
        BucketReduction(specs, host, wire, modules, torch.device("cpu")),
    ]
    layout = ways[0].layout
    wrong = []
    for turn in range(4):
        gradients: list[Tensor | None] = [
            made(spec.elements, getattr(torch, spec.dtype), seed=10 * turn + host.rank)
            .view(spec.shape)
            .nan_to_num(0, 0, 0)
            for spec in specs
        ]
        gradients[turn] = None if host.rank == turn % 2 else gradients[turn]
        for way in ways:
            way.sink.store(gradients)
        host.barrier()
        for way in ways:
            way.reduce()
        host.barrier()
        sums = [[view.clone() for view in layout.views(way.result)] for way in ways]
        norms = [host.sum([squared_norm(way.measured)])[0] for way in ways]
        wrong += [
            f"{specs[index].name}, round {turn}"
            for other in sums[1:]
            for index, pair in enumerate(zip(sums[0], other, strict=True))
            if not torch.equal(*pair)
        ]
        if any(abs(norm - norms[0]) > 1e-12 * norms[0] for norm in norms) or not norms[0] > 0:
            wrong.append(f"norm, round {turn}")
        for tensor in {id(tensor): tensor for way in ways for tensor in way.held}.values():
            tensor.mul_(0.5)
        host.barrier()
        if not all(
            torch.equal(view, whole / 2)
            for way, before in zip(ways, sums, strict=True)
            for view, whole in zip(layout.views(way.result), before, strict=True)
        ):
            wrong.append(f"scale, round {turn}")
        host.barrier()
    wire.close()
    return wrong

"""What it costs a step that buckets leave during backward, beside DDP: `hooks.py [PARAMETERS]`; prints microseconds.

CPU time of the training thread. Tensors of four elements, so that kernels take next to nothing, and a collective that
does nothing: what is left is Python, and one call a bucket that copies, which is also timed alone. DDP has one process
and gloo, whose own threads are not counted. On an accelerator the same calls run on its host: this needs none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from headrace.collectives.compression import Compression
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.modules import describe
from headrace.training.buckets import BucketSink, SummedUse
from headrace.training.gradients import FlatLayout

ROUNDS, STEPS, BUCKETS = 41, 20, 4


class Sent(ThreadCollective):  # type: ignore[misc]
    """Carries nothing."""

    def start_all_reduce(self, tensor: Tensor, compression: object = None) -> Callable[[], None]:
        return lambda: None


class Many(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.each = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(parameters)])

    def forward(self) -> Tensor:
        return torch.stack([*self.each]).sum()


def sink_of(module: nn.Module) -> BucketSink:
    """Returns a sink of a few buckets."""
    specs = describe(module).trainable
    group = Sent(ThreadGroup(1), 0)
    size = sum(spec.bytes for spec in specs) // BUCKETS
    group.bucket_bytes = (size, size)
    used = SummedUse(group, specs, torch.device("cpu"), lambda: None)
    sizes, plain = [spec.bytes for spec in specs], Compression("plain", used.region)
    return BucketSink([*module.parameters()], sizes, FlatLayout(specs), used.region, used, group, plain)


def microseconds(act: Callable[[], object]) -> float:
    began = thread_time()
    for _ in range(STEPS):
        act()
    return 1e6 * (thread_time() - began) / STEPS


def _copy(place: Tensor, gradient: Tensor) -> None:
    place.copy_(gradient)


def main(parameters: int) -> None:
    torch.set_num_threads(1)
    module = Many(parameters)
    every = [*module.parameters()]
    sink = sink_of(module)

    def bare() -> None:
        for parameter in every:
            parameter.grad = None
        module().backward()

    def sent() -> None:
        for parameter in every:
            parameter.grad = None
        loss = module()
        with sink.sending():
            loss.backward()
        sink.store([parameter.grad for parameter in every])
        sink.wait()

    others = Many(parameters)
    for parameter, place in zip(others.parameters(), places := [torch.zeros(4) for _ in every], strict=True):
        parameter.register_hook(partial(_copy, place))

    def hooked() -> None:
        for parameter in others.parameters():
            parameter.grad = None
        others().backward()

    peer = DistributedDataParallel(Many(parameters), gradient_as_bucket_view=True)

    def ddp() -> None:
        for parameter in peer.parameters():
            parameter.grad = None
        peer().backward()

    def copied() -> None:
        bare()
        torch._foreach_copy_(places, [parameter.grad for parameter in every])

    ways = {"bare": bare, "bare and one copy": copied, "buckets": sent, "a hook a parameter": hooked, "DDP": ddp}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, act in ways.items():
            times[name].append(microseconds(act))
    found = {name: round(median(each), 1) for name, each in times.items()}
    cost = {name: round(median(a - b for a, b in zip(times[name], times["bare"], strict=True)), 1) for name in ways}
    least = {name: round(min(each), 1) for name, each in times.items()}
    print(json.dumps({"parameters": parameters, "buckets": BUCKETS, "us": found, "above bare": cost, "least": least}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 160)
        distributed.destroy_process_group()

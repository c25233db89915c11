"""What tensor parallelism makes of a model: its layout is tried on threads, and what they sum is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headrace.batches import examples_of
from headrace.spec.compute import SlicedProfile
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.replica import RewrittenModel
from headrace.tensor_parallel.verification import compute


def sliced_profile(module: nn.Module, batch: Any, inputs: Any, devices: int) -> SlicedProfile:
    """Returns what each of so many devices has and does, and what all sum for one example of a batch.

    Raises:
        HeadraceError: the model cannot be divided by slices, or is no function of its input.
    """
    trial = Trial(batch, inputs)
    made = TensorParallel().tried(module, devices, trial)
    with FlopCounterMode(display=False) as whole:
        trial.run(module)

    def run(one: RewrittenModel) -> tuple[int, int]:
        with FlopCounterMode(display=False) as counted:
            trial.run(one.module)
        before = one.group.moved_bytes
        compute(one.module, trial, True)
        # A thread counts what it gives and what it takes.
        return counted.get_total_flops(), (one.group.moved_bytes - before) // 2

    with ThreadPoolExecutor(devices) as threads:
        found = list(threads.map(run, made))
    trained = [each for each in module.parameters() if each.requires_grad]
    held = sum(each.nbytes for each in made[0].module.parameters() if each.requires_grad)
    return SlicedProfile(
        devices,
        held / max(1, sum(each.nbytes for each in trained)),
        max(flops for flops, _ in found) / max(1, whole.get_total_flops()),
        max(summed for _, summed in found) / examples_of(batch),
    )

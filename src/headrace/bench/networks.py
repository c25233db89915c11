"""Known networks for images of 224 x 224: how long inference, and forward with backward, take for a batch of 16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.bench.figures import Figure, Gap, MachineFigures, figure, missing
from headrace.bench.library import Unusable, import_models
from headrace.bench.settings import (
    GPU,
    NO_GPU,
    Effort,
    Setting,
    gpu_settings,
    processor_settings,
    repeat,
)
from headrace.errors import JobError
from headrace.machine.allocator import give_back
from headrace.machine.resources import spare_memory_bytes
from headrace.report.format import byte_count
from headrace.training.fixed_shapes.graph_mode import CompiledModule

BATCH = 16
_SIDE = 224
_PROBED = 2


def _resnet200(models: Any) -> nn.Module:
    # torchvision has no function for it, but the class.
    network: nn.Module = models.resnet.ResNet(models.resnet.Bottleneck, [3, 24, 36, 3])
    return network


NETWORKS: Mapping[str, Callable[[Any], nn.Module]] = {
    "AlexNet": lambda models: models.alexnet(),
    "ResNet-18": lambda models: models.resnet18(),
    "Inception-V1": lambda models: models.googlenet(weights=None, aux_logits=False, init_weights=False),
    "ResNet-34": lambda models: models.resnet34(),
    "ResNet-50": lambda models: models.resnet50(),
    "VGG-16": lambda models: models.vgg16(),
    "VGG-19": lambda models: models.vgg19(),
    "ResNet-101": lambda models: models.resnet101(),
    "ResNet-152": lambda models: models.resnet152(),
    "ResNet-200": _resnet200,
}
"""torchvision's, by name; those that compute least come first."""


def networks(effort: Effort, ends: float, saved: MachineFigures) -> Iterator[Figure | Gap]:
    """Measures both, unless they are kept; after `ends`, by the monotonic clock, no other number is begun."""
    *_, cpu = processor_settings()
    settings = [replace(cpu, name="CPU")]
    if effort.compiled:
        settings.append(replace(cpu, name="CPU, compiled", compiled=True))
    for gpu in gpu_settings():
        settings += [replace(gpu, name=f"{GPU}, no cuDNN", cudnn=False), gpu]
        if effort.compiled:
            settings.append(replace(gpu, name=f"{GPU}, compiled", compiled=True))
    columns = [setting.name for setting in settings]
    try:
        models = import_models()
    except Unusable as error:
        yield from (gap for part in ("inference", "training") for gap in missing(part, columns, str(error)))
        return
    for name, make in list(NETWORKS.items())[: effort.networks]:
        for setting in settings:
            yield from _network(name, partial(make, models), setting, effort, ends, saved)
    for part in ("inference", "training"):
        if effort.networks < len(NETWORKS):
            rest = list(NETWORKS)[effort.networks :]
            yield from (Gap(part, row, column, "left out by --quick") for row in rest for column in columns)
        if not effort.compiled:
            yield from missing(part, ["CPU, compiled"], "left out by --quick")
        if not gpu_settings():
            yield from missing(part, [f"{GPU}, no cuDNN", GPU, f"{GPU}, compiled"], NO_GPU)


class _Batch:
    """A network on a device, and what it is given."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network = network.to(device)
        self.images = torch.randn(BATCH, 3, _SIDE, _SIDE, device=device)
        self._targets = torch.randint(1000, (BATCH,), device=device)

    def infer(self, run: Callable[..., Any]) -> None:
        """Computes the network's output by `run`, the network as it is or compiled."""
        with torch.inference_mode():
            run(self.images)

    def train(self, run: Callable[..., Any]) -> None:
        """Computes loss and gradients."""
        self.network.zero_grad()
        nn.functional.cross_entropy(run(self.images), self._targets).backward()


def _network(
    name: str, make: Callable[[], nn.Module], setting: Setting, effort: Effort, ends: float, saved: MachineFigures
) -> Iterator[Figure | Gap]:
    batch: _Batch | None = None
    for part in ("inference", "training"):
        before = saved.at(part, name, setting.name)
        if before:
            yield before
            continue
        if time.monotonic() > ends:
            yield Gap(part, name, setting.name, f"left out by --quick, after {effort.until_s:.0f} s")
            continue
        batch = batch or _Batch(make(), setting.device)
        yield _measured(part, name, batch, setting, effort)
    del batch
    give_back()


def _measured(part: str, name: str, batch: _Batch, setting: Setting, effort: Effort) -> Figure | Gap:
    network = batch.network.train(part == "training")
    short = None if part == "inference" or setting.on_gpu else _lacking_memory(network, batch.images)
    if short:
        return Gap(part, name, setting.name, short)
    graph = CompiledModule(network, BATCH) if setting.compiled else None
    run = graph.forward(BATCH) if graph else network
    act = partial(batch.infer if part == "inference" else batch.train, run)
    try:
        with setting.applied(), graph.errors() if graph else nullcontext():
            times = repeat(act, setting, effort.cell_s)
    except torch.OutOfMemoryError:
        return Gap(part, name, setting.name, "out of memory")
    except JobError as error:
        return Gap(part, name, setting.name, str(error))
    finally:
        if graph:
            # Otherwise the compiler gives up after some networks that share code, and runs the others as they are.
            torch.compiler.reset()
    return figure(part, name, setting.name, "ms", [1e3 * seconds for seconds in times])


def _lacking_memory(network: nn.Module, images: Tensor) -> str | None:
    """Returns what is short for a training step, by what autograd keeps of a small batch; None if it fits."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(images[:_PROBED])
    parameter_bytes = sum(parameter.nbytes for parameter in network.parameters())
    needed = parameter_bytes + max(0, sum(storages.values()) - parameter_bytes) * BATCH // _PROBED
    spare = spare_memory_bytes()
    if 1.25 * needed < spare:
        return None
    return f"needs about {byte_count(1.25 * needed)}, and {byte_count(spare)} are free"

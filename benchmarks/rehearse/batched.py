"""Whether the gradients of many workers are computed quicker at once (torch.func.vmap) than one after the other.

Workers of a rehearsal compute with the parameters that each has fetched. Where all have the same, as in the first round
of a lock-step server, one batch of all does; else each worker's parameters differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from headrace.models import mlp

FOLDER = Path(__file__).resolve().parent


def loss_of(module: nn.Module) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, parameters, (images,)), labels)

    return loss


def one_by_one(module: nn.Module, images: Tensor, labels: Tensor) -> list[list[Tensor]]:
    found = []
    for own, targets in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(module(own), targets)
        found.append(list(torch.autograd.grad(loss, list(module.parameters()))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--share", type=int, default=32, help="examples of a worker's step")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "batched.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    module = mlp()
    images = torch.rand(options.workers, options.share, 784)
    labels = torch.randint(10, (options.workers, options.share))
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    each = {name: value.expand(options.workers, *value.shape).clone() for name, value in parameters.items()}
    gradient = grad(loss_of(module))
    cases: dict[str, Callable[[], object]] = {
        "one after the other": lambda: one_by_one(module, images, labels),
        "vmap, all with the same parameters": lambda: vmap(gradient, (None, 0, 0))(parameters, images, labels),
        "vmap, each with its own parameters": lambda: vmap(gradient)(each, images, labels),
    }
    reference = one_by_one(module, images, labels)
    for name, case in list(cases.items())[1:]:
        found = case()
        assert isinstance(found, dict)
        furthest = max(
            float((value[worker] - reference[worker][place]).abs().max())
            for place, value in enumerate(found.values())
            for worker in range(options.workers)
        )
        assert furthest < 1e-5, (name, furthest)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(options.turns + 1):
        for name, case in cases.items():
            began = perf_counter()
            case()
            if turn:  # the first warms up
                seconds[name].append(perf_counter() - began)
    base = median(seconds["one after the other"])
    print(f"{options.workers} workers, {options.share} examples each, {torch.get_num_threads()} threads")
    for name, mine in seconds.items():
        print(f"{name:<36}{median(mine):>8.3f} s{median(mine) / base:>8.2f} x ({min(mine):.3f} to {max(mine):.3f} s)")
    document = {"workers": options.workers, "share": options.share, "seconds": seconds, "torch": torch.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

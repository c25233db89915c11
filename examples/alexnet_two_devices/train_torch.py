"""The training of job.py by hand, in plain PyTorch: the convolutions data-parallel, the dense layers model-parallel.

torchrun --nproc-per-node 2 examples/alexnet_two_devices/train_torch.py

Each device computes its half of the batch through the convolutions, all get all features, and each computes its half
of every dense layer's outputs for the whole batch (Krizhevsky, "One weird trick for parallelizing convolutional neural
networks", 2014). To remember: what is summed where, and once; equal masks of dropout; whole tensors to save, which
are left out here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, linear

from headrace.data import fashion_mnist_or_digits
from headrace.models import AlexNet, alexnet

LR, EPOCHS, BATCH, COUNT = 0.001, 2, 128, 6_000


class Gather(torch.autograd.Function):
    """Slices along a dim to the whole; every device goes on with other work, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


class Output(torch.autograd.Function):
    """Slices of the outputs to the whole, of which every device computes the same loss: gradients are not summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].chunk(dist.get_world_size(), 1)[dist.get_rank()]


def split(model: AlexNet) -> None:
    """Leaves this device its half of every dense layer's outputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for layer in model.classifier:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(world)[rank].clone())
            layer.bias = nn.Parameter(layer.bias.detach().chunk(world)[rank].clone())


def forward(model: AlexNet, images: Tensor) -> Tensor:
    own = images.tensor_split(dist.get_world_size())[dist.get_rank()]
    first, second, third = (layer for layer in model.classifier if isinstance(layer, nn.Linear))
    # All have all features from here on, and one seed.
    x = dropout(Gather.apply(model.features(own).flatten(1), 0), 0.5, model.training)
    x = dropout(Gather.apply(linear(x, first.weight, first.bias).relu(), 1), 0.5, model.training)
    x = Gather.apply(linear(x, second.weight, second.bias).relu(), 1)
    logits: Tensor = Output.apply(linear(x, third.weight, third.bias))
    return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = fashion_mnist_or_digits()
    inputs, target = images.train[0][:COUNT], images.train[1][:COUNT]
    model = alexnet()
    split(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(COUNT)
        # Halves of a batch are of one length here.
        for batch in order[: COUNT - COUNT % BATCH].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(forward(model, inputs[batch]), target[batch]).backward()
            for parameter in model.features.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        accuracy = evaluate(model, images.test[0][:2_000], images.test[1][:2_000])
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}")
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: AlexNet, inputs: Tensor, target: Tensor) -> float:
    model.eval()
    right = sum(
        int((forward(model, x).argmax(1) == y).sum()) for x, y in zip(inputs.split(500), target.split(500), strict=True)
    )
    return right / len(target)


if __name__ == "__main__":
    main()

"""Draws digits that a trained generator makes, and says how far their statistics are from those of the data.

python examples/gan/draw.py runs/gan digits.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from job import GAN, NOISE
from torch import Tensor
from torch.nn.functional import pad

import headrace as hr

ACROSS = 10
"""Images in a row, and rows."""


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Returns the distance of two sets of images: that of normal distributions with their means and covariances.

    Heusel et al., "GANs trained by a two time-scale update rule" (2017), equation 6, on pixels, since 8 x 8 are few.
    """
    first, second = (each.double().flatten(1) for each in (one, other))
    apart = (first.mean(0) - second.mean(0)).square().sum()
    covariances = first.T.cov(), second.T.cov()
    # The trace of the root of a product of covariances: their product has eigenvalues of at least 0.
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    return float(apart + sum(each.trace() for each in covariances) - 2 * roots)


def made_by(model: torch.nn.Module, count: int, seed: int = 0) -> Tensor:
    """Returns images of random noise."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        images: Tensor = model(torch.randn(count, NOISE, generator=draws))
    return images


def main(run_dir: str, picture: str = "digits.png") -> None:
    import cv2
    from safetensors.torch import load_file

    images = hr.data.digits()
    torch.manual_seed(0)
    model = GAN()
    untrained = made_by(model, len(images.test_images))
    model.load_state_dict(load_file(Path(run_dir) / "model.safetensors"))
    made = made_by(model, len(images.test_images))
    for name, each in (("other real images", images.train_images), ("made", made), ("made, untrained", untrained)):
        print(f"distance to real images, {name}: {frechet_distance(each, images.test_images):.2f}")
    apart = pad(made[: ACROSS**2], (1, 1, 1, 1)).view(ACROSS, ACROSS, 10, 10)
    rows = apart.transpose(1, 2).reshape(10 * ACROSS, 10 * ACROSS)
    dark = rows.repeat_interleave(4, 0).repeat_interleave(4, 1)
    cv2.imwrite(picture, (255 * (1 - dark)).clamp(0, 255).byte().numpy())
    print(f"drawn: {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])

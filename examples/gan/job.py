"""A generator and a discriminator of handwritten digits, each with a loss and an optimizer of its own.

headrace train examples/gan/job.py --strategy mirrored --workers 2 --run-dir runs/gan
python examples/gan/draw.py runs/gan
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import headrace as hr

NOISE = 16
"""Numbers that an image is made from."""

Batch = Mapping[str, Tensor]


class GAN(nn.Module):
    """Goodfellow et al., "Generative adversarial nets" (2014). Called with noise, it returns images."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
        )
        self.discriminator = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Returns images `(batch, 1, 8, 8)` of noise `(batch, NOISE)`."""
        images: Tensor = self.generator(noise)
        return images


def discriminator_loss(model: GAN, batch: Batch) -> Tensor:
    """Minus the log-likelihood of telling real images from made ones."""
    real, made = model.discriminator(batch["image"]), model.discriminator(model(batch["noise"]))
    return softplus(-real).mean() + softplus(made).mean()


def generator_loss(model: GAN, batch: Batch) -> Tensor:
    """Minus the log-likelihood that made images pass for real ones."""
    return softplus(-model.discriminator(model(batch["noise"]))).mean()


def with_noise(example: tuple[Tensor, Tensor], rng: np.random.Generator) -> dict[str, Tensor]:
    """Draws the noise with the example, so that any number of workers draw the same."""
    image, _ = example
    return {"image": image, "noise": torch.from_numpy(rng.standard_normal(NOISE, dtype=np.float32))}


def job(lr: float = 2e-3, epochs: int = 100, batch: int = 64, rounds: int = 1) -> hr.Job:
    images = hr.data.digits()
    adam = functools.partial(torch.optim.Adam, betas=(0.5, 0.999))
    return hr.Job(
        model=GAN,
        optimizer={
            "discriminator": hr.ParameterSet(functools.partial(adam, lr=lr), rounds=rounds),
            "generator": functools.partial(adam, lr=2 * lr),
        },
        loss={"discriminator": discriminator_loss, "generator": generator_loss},
        data=hr.data.from_arrays(*images.train).shuffle().map(with_noise),
        eval_data=hr.data.from_arrays(*images.test).map(with_noise),
        global_batch_size=batch,
        epochs=epochs,
        seed=0,
        options=hr.Options(ema_decay=0.99, eval_every=500),
        inputs="noise",
        target="image",
    )

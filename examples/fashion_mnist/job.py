"""A small CNN on Fashion-MNIST: what is trained. How it is distributed stands on the command line.

headrace compare examples/fashion_mnist/job.py --strategies one_device,mirrored,central_storage --workers 2
headrace train examples/fashion_mnist/job.py --strategy mirrored --workers 2 --set lr=0.001
"""

from __future__ import annotations

import functools

import torch

import headrace as hr
from headrace.data import fashion_mnist_or_digits
from headrace.models import fashion_cnn


def job(lr: float = 0.003, epochs: int = 3, batch: int = 256) -> hr.Job:
    images = fashion_mnist_or_digits()
    return hr.Job(
        model=fashion_cnn,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.Adam, lr=lr),
        data=images.train,
        eval_data=images.test,
        global_batch_size=batch,
        epochs=epochs,
        seed=0,
    )

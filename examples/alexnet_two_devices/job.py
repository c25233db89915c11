"""A small AlexNet on Fashion-MNIST. That its layers are split over two devices stands on the command line.

headrace train examples/alexnet_two_devices/job.py --strategy "tensor_parallel(devices=2)"
headrace train examples/alexnet_two_devices/job.py \\
    --strategy "tensor_parallel(devices=2, rules={'features': 'batch', 'classifier.*': 'column'})"
"""

from __future__ import annotations

import functools

import torch

import headrace as hr
from headrace.data import fashion_mnist_or_digits
from headrace.models import alexnet


def job(lr: float = 0.001, epochs: int = 2, batch: int = 128, count: int = 6_000) -> hr.Job:
    images = fashion_mnist_or_digits()
    return hr.Job(
        model=alexnet,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.Adam, lr=lr),
        data=(images.train[0][:count], images.train[1][:count]),
        eval_data=(images.test[0][:2_000], images.test[1][:2_000]),
        global_batch_size=batch,
        epochs=epochs,
        seed=0,
    )

"""A small network on handwritten digits: it trains in a second or two, and the guide uses it throughout.

headrace train examples/digits/job.py --strategy mirrored --workers 2
headrace compare examples/digits/job.py --workers 2
"""

from __future__ import annotations

import functools

import torch

import headrace as hr
from headrace.models import fashion_cnn


def job(lr: float = 0.1, epochs: int = 5, batch: int = 64) -> hr.Job:
    images = hr.data.digits()
    return hr.Job(
        model=fashion_cnn,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=lr, momentum=0.9),
        data=images.train,
        eval_data=images.test,
        global_batch_size=batch,
        epochs=epochs,
        seed=0,
    )

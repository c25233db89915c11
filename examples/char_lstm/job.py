"""A character-level LSTM on the standard library's source: predicts the next character at every place.

headrace train examples/char_lstm/job.py --strategy mirrored --workers 2 --set epochs=1
"""

from __future__ import annotations

import functools
import math

import torch
from stdlib_text import VOCAB, texts
from torch import Tensor
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.models import char_lstm


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over batch and time of logits `(batch, time, vocab)` against `(batch, time)`."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).double().mean()


def bits_per_character(output: Tensor, target: Tensor) -> Tensor:
    return loss(output, target) / math.log(2)


def job(lr: float = 0.005, epochs: int = 2, batch: int = 128, hidden: int = 192) -> hr.Job:
    train, test = texts()
    return hr.Job(
        model=functools.partial(char_lstm, VOCAB, embedding=32, hidden=hidden),
        loss=loss,
        metrics={"accuracy": accuracy, "bits_per_character": bits_per_character},
        optimizer=functools.partial(torch.optim.Adam, lr=lr),
        data=train,
        eval_data=test,
        global_batch_size=batch,
        epochs=epochs,
        seed=0,
    )

"""Optimizers that update only the rows of a table which have a gradient, and everything else as torch does."""

from __future__ import annotations

from typing import Any

import torch


class LazyAdam(torch.optim.Adam):
    """Adam, and for tables of embeddings the Adam whose moments change only for rows that have a gradient.

    What `torch.optim.SparseAdam` does with tables (Kingma and Ba 2015, without decay of the moments of other rows).

    Args:
        params: as for every optimizer of torch.
        lr: the learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.

    Examples:
        >>> from dataclasses import replace
        >>> from functools import partial
        >>> hr.fit(replace(job, optimizer=partial(hr.LazyAdam, lr=0.01))).status
        'ok'
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
        super().__init__(params, lr=lr, betas=betas, eps=eps)


class RowwiseAdagrad(torch.optim.Adagrad):
    """Adagrad, and for tables of embeddings with one accumulator a row: the mean of its squared gradients.

    A table then has one number of state a row, where Adagrad has as many as the row is wide (Naumov et al., "Deep
    learning recommendation model", 2019, as FBGEMM's exact row-wise Adagrad).

    Args:
        params: as for every optimizer of torch.
        lr: the learning rate.
        eps: added to the root of the accumulator.

    Examples:
        >>> from dataclasses import replace
        >>> from functools import partial
        >>> hr.fit(replace(job, optimizer=partial(hr.RowwiseAdagrad, lr=0.1))).status
        'ok'
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10):
        super().__init__(params, lr=lr, eps=eps)

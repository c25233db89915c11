"""Parameter averaging by the names of its papers, each with that paper's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from headrace.averaging.outer_steps import Elastic, Nesterov
from headrace.strategies.parameter_averaging import ParameterAveraging

LocalSGD: Callable[..., ParameterAveraging] = functools.partial(ParameterAveraging, period=16)
"""Local SGD: the mean of the workers every 16 rounds, if not told otherwise (Stich, 2019).

The arguments are those of `ParameterAveraging`.

Examples:
    >>> hr.LocalSGD(workers=2).period, hr.LocalSGD(workers=2, period=4).period
    (16, 4)
"""

DiLoCo: Callable[..., ParameterAveraging] = functools.partial(ParameterAveraging, period=100, outer=Nesterov())
"""DiLoCo: an outer step with Nesterov momentum every 100 rounds, if not told otherwise (Douillard et al., 2023).

The arguments are those of `ParameterAveraging`.

Examples:
    >>> hr.DiLoCo(workers=2).period, hr.DiLoCo(workers=2, period=4).period
    (100, 4)
"""

EASGD: Callable[..., ParameterAveraging] = functools.partial(ParameterAveraging, period=16, outer=Elastic())
"""Elastic averaging SGD, every 16 rounds if not told otherwise (Zhang et al., 2015).

The arguments are those of `ParameterAveraging`.

Examples:
    >>> hr.EASGD(workers=2).period, hr.EASGD(workers=2, period=4).period
    (16, 4)
"""

FedAvg: Callable[..., ParameterAveraging] = functools.partial(ParameterAveraging, period=5, reset_optimizer_state=True)
"""Federated averaging: clients step alone for 5 rounds, if not told otherwise, each time with a new optimizer.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017, algorithm 1. The
workers are the clients that take part; `hr.data.by_client` says which examples are whose. Adaptive servers are outer
steps: `outer=hr.FedAdam()`. The arguments are those of `ParameterAveraging`.

Examples:
    >>> hr.FedAvg(workers=2).period, hr.FedAvg(workers=2, outer=hr.FedAdam()).outer.lr
    (5, 0.1)
"""

FedProx: Callable[..., ParameterAveraging] = functools.partial(FedAvg, proximal=0.01)
"""FedAvg whose clients are held near the model that they began from (Li et al., 2020, algorithm 2).

The arguments are those of `ParameterAveraging`; `proximal` is mu, 0.01 if not told otherwise.

Examples:
    >>> hr.FedProx(workers=2).proximal, hr.FedProx(workers=2, proximal=0.1).proximal
    (0.01, 0.1)
"""

LocalAdam: Callable[..., ParameterAveraging] = functools.partial(
    ParameterAveraging, period=16, average_optimizer_state=True
)
"""Local steps of Adam, whose moments are averaged with the parameters, every 16 rounds if not told otherwise.

Reddi et al., "Adaptive federated optimization", 2021, have the moments on the server alone; here they are the workers',
as in Cheng and Glasgow, "Convergence of distributed adaptive optimization with local updates", 2025, algorithm 1. The
job's optimizer must be `torch.optim.Adam` or another whose state has a mean. The arguments are those of
`ParameterAveraging`.

Examples:
    >>> hr.LocalAdam(workers=2).average_optimizer_state
    True
"""

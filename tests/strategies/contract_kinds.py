"""Rows of rules for gradients, of local steps, of hybrids, of what is recorded, and of divided sequences."""

from __future__ import annotations

from functools import partial

import torch

import headrace as hr
from headrace.testing.strategies import StrategyContract as Row
from strategies import references
from strategies.contract_models import LAYERS, SEQUENCES

MATRICES = frozenset({"muon", "muon-one-matrix", "muon-schedule", "adafactor", "blocks"})
"""Variants whose optimizers look at whole matrices."""

STATISTICS = frozenset({"statistics"})
"""Of normalisation: each worker has its own, and one device those of the whole batch."""

PARTS = frozenset({"partly-used"})
"""Of a model whose forward looks at its examples, which no recording has: it is refused."""

PIPELINE = Row(
    partial(hr.Pipeline, micro_batches=1), many=(2, 3), replicas=lambda workers: 1, whole=False, leaves_out=PARTS
)
# Traced, and run as it is; models that are no one program have tests of their own.
TPU = Row(partial(hr.TPU, compiler="eager"), workers=(2,), many=(2, 3), whole=False, leaves_out=PARTS | STATISTICS)

HYBRIDS = {
    "replicas divided along the sequence": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(max(1, workers // 2)), hr.TensorParallel(2, sequence=True)),
        workers=(4,),
        many=(4, 4),
        replicas=lambda workers: workers // 2,
        whole=False,
        model=LAYERS,
        refuses=MATRICES,
    ),
    "replicas of rings": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(workers=max(1, workers // 2)), hr.ContextParallel(2)),
        workers=(4,),
        many=(4, 4),
        replicas=lambda workers: workers // 2,
        whole=False,
        model=SEQUENCES,
    ),
    "sharded rings": Row(
        lambda workers: hr.Hybrid(hr.FullySharded(workers=max(1, workers // 2)), hr.ContextParallel(2)),
        workers=(4,),
        many=(4, 4),
        replicas=lambda workers: workers // 2,
        whole=False,
        model=SEQUENCES,
        refuses=MATRICES,
    ),
    "sharded replicas": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(workers=max(1, workers // 2)), hr.FullySharded(workers=2)),
        workers=(4,),
        many=(4, 4),
        refuses=MATRICES,
    ),
    "sharded stages": Row(
        lambda workers: hr.Hybrid(hr.FullySharded(workers=max(1, workers // 2)), hr.Pipeline(2, micro_batches=1)),
        workers=(4,),
        many=(4, 4),
        replicas=lambda workers: workers // 2,
        whole=False,
        refuses=MATRICES,
        leaves_out=PARTS | STATISTICS,
    ),
}

# Over layers that communicate, a worker's gradient is no part of the batch's that a plain loop has: see
# test_aggregated.py.
AGGREGATED = {
    name: Row(partial(hr.Aggregated, by=by), reference, leaves_out=frozenset({"options"}))
    for name, by, reference in (
        ("aggregated-median", hr.TrimmedMean(), partial(references.aggregated, rule=references.median)),
        ("aggregated-power-sgd", hr.PowerSGD(2), partial(references.aggregated, rule=references.power_sgd, rank=2)),
        ("aggregated-sign-sgd", hr.SignSGD(0.5), partial(references.aggregated, rule=references.signum)),
        ("aggregated-top-k", hr.TopK(0.2), partial(references.aggregated, rule=references.top_k)),
    )
}

GOSSIPS = {
    "gossip-after": Row(partial(hr.Gossip, mix="after"), partial(references.gossip, after=True)),
    "gossip-hypercube": Row(partial(hr.Gossip, topology="hypercube"), references.GOSSIPS["hypercube"], many=(4, 8)),
    "gossip-random": Row(partial(hr.Gossip, topology="random", period=2), references.GOSSIPS["random"]),
}

LOCAL = {
    "fed_prox": Row(
        partial(hr.ParameterAveraging, period=3, proximal=0.3, reset_optimizer_state=True),
        partial(references.local_sgd, proximal=0.3, reset=True),
        period=3,
    ),
    "local_adam": Row(
        partial(hr.ParameterAveraging, period=3, average_optimizer_state=True),
        partial(references.local_sgd, adam=True),
        # Not the usual 1e-8, by which a gradient of nearly 0 makes a step of rounding.
        optimizer=partial(torch.optim.Adam, lr=0.01, eps=1e-4),
        period=3,
        # The mean of counts of steps, which are float32, is rounded by their weights.
        leaves_out=frozenset({"weighed"}),
    ),
    "slow_mo": Row(
        partial(hr.ParameterAveraging, period=3, outer=hr.SlowMo(0.9, 0.6)),
        references.slow_mo,
        period=3,
    ),
}

# One iteration a batch: three, with curvature of other batches, overshoot, and magnify rounding 100,000 times.
LBFGS = partial(torch.optim.LBFGS, max_iter=1, max_eval=5, history_size=10, line_search_fn="strong_wolfe")
SANDBLASTER = Row(
    hr.Sandblaster,
    references.sandblaster,
    servers=1,
    optimizer=LBFGS,
    leaves_out=frozenset({"partly-used", "statistics", "weighed"}),
)

IN_PROCESSES = {
    "mlp": ("even", 2), "cnn": ("tiny", 3), "lstm": ("uneven", 2), "tied": ("tiny", 2), "idle": ("uneven", 3),
    "buffers": ("even", 3), "partial": ("uneven", 2), "mean-cnn": ("tiny", 2), "clipped-cnn": ("uneven", 3),
    "muon-one-matrix": ("even", 3), "nesterov-foreach": ("even", 3), "own-optimizer": ("uneven", 2),
}  # fmt: skip
"""Size and number of workers. In threads all strategies train each model; in processes mirrored and one other."""

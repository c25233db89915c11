"""Rows of what is recorded, of hybrids, and of sequences that are divided between split blocks."""

from __future__ import annotations

from functools import partial

import headrace as hr
from headrace.testing.strategies import StrategyContract as Row
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

"""Rows of hybrids, and of sequences that are divided between split blocks."""

from __future__ import annotations

import headrace as hr
from headrace.testing.strategies import StrategyContract as Row
from strategies.contract_models import LAYERS, SEQUENCES

MATRICES = frozenset({"muon", "muon-one-matrix", "muon-schedule", "adafactor"})
"""Variants whose optimizers look at whole matrices."""

STATISTICS = frozenset({"statistics"})
"""Of normalisation: each worker has its own, and one device those of the whole batch."""

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
    ),
}

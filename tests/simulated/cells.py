"""The cells of the contract on simulated devices: strategies and cases, for processes without the accelerator, too."""

from __future__ import annotations

from functools import partial

import headrace as hr
from headrace.testing.strategies import StrategyContract as Row
from strategies import references
from strategies.contract_models import MIXTURE, MODELS, VARIANTS, Case
from strategies.hosts_models import CASES as STAGED
from strategies.test_contract import KINDS

__all__ = ["CASES", "CELLS", "as_on_cpus", "cases_of"]

ALONE = ("one_device", "downpour", "sandblaster", "parameter_server-asynchronous")
"""Of one worker, or of numbers that no two runs share: test_mixed_devices.py has them."""

_PARTS, _STAGES, _SLICES = hr.FullySharded(2), hr.Pipeline(2, micro_batches=1), hr.TensorParallel(2)
LEVELS: dict[str, tuple[hr.Strategy, ...]] = {
    "parts of slices": (_PARTS, _SLICES),
    "stages of slices": (_STAGES, _SLICES),
    "replicas of parts of slices": (hr.Mirrored(2), _PARTS, _SLICES),
    "replicas of stages of slices": (hr.Mirrored(2), _STAGES, _SLICES),
    "parts of stages of slices": (_PARTS, _STAGES, _SLICES),
    "four levels": (hr.Mirrored(2), _PARTS, _STAGES, _SLICES),
}
"""Hybrids of two at each level, also on one host."""

CELLS: dict[str, Row] = {
    **{name: row for name, row in KINDS.items() if name not in ALONE},
    "mirrored without overlap": Row(partial(hr.Mirrored, overlap=False)),
    "pipeline-1f1b": Row(partial(hr.Pipeline, micro_batches=2, schedule="1f1b"), whole=False),
    "pipeline-gpipe": Row(partial(hr.Pipeline, micro_batches=2, schedule="gpipe"), whole=False),
    "hybrid of stages": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(workers // 2), hr.Pipeline(2, micro_batches=1)), whole=False
    ),
    "mirrored experts": Row(
        lambda workers: hr.Hybrid(hr.Mirrored(workers // 2), hr.ExpertParallel(2)), whole=False, model=MIXTURE
    ),
    **{name: Row(lambda _, levels=levels: hr.Hybrid(*levels), whole=False) for name, levels in LEVELS.items()},
    "local_sgd": Row(partial(hr.LocalSGD, period=3), references.local_sgd),
}
"""The rows of the contract, and what else there is on accelerators, by the number of workers."""

# A device draws other numbers than a CPU.
WITHOUT_DRAWS = {name: case for name, case in STAGED.items() if name != "dropping"}
CASES: dict[str, Case] = {**WITHOUT_DRAWS, **MODELS, **VARIANTS}


def cases_of(name: str) -> list[str]:
    """Returns what a strategy trains; the stages of a pipeline train models that can be cut into four."""
    row = CELLS[name]
    if row.reference is not references.one_device:
        return ["mlp", "deep"]
    if not row.whole:
        if name == "tpu":
            return ["mlp", "deep"]
        # Replicas have statistics of their own, and a tied weight on several stages has no norm.
        left = set() if name.startswith("pipeline") else {"normalised", "clipped-tied"}
        return [case for case in WITHOUT_DRAWS if case not in row.refuses | left]
    # Workers that meet in every layer are refused, see test_parameter_server.py.
    refuses = row.refuses | {case for case in CASES if row.servers and CASES[case].options.batch_norm == "sync"}
    return [case for case in (*MODELS, *VARIANTS) if case not in refuses]


def as_on_cpus(name: str, case: str) -> bool:
    """Whether a cell has the numbers of the same strategy on CPUs, which are not those of one device.

    Workers of servers clip each its own gradient, and statistics of micro-batches are their own: for both tests of CPUs
    have plain loops (test_parameter_server.py, test_pipeline_memory.py).
    """
    clips = CELLS[name].servers and CASES[case].options.clip_norm is not None
    return bool(clips) or (name in ("pipeline-1f1b", "pipeline-gpipe") and case == "normalised")

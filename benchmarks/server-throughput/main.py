"""Throughput of two workers and one server on one host, beside two workers that never talk. See README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival
from workloads import throughput

import headrace as hr
from headrace.engine.local.engine import LocalEngine

CEILING = "ceiling: 2 unconnected, tuned"
TENSORFLOW = "TensorFlow ParameterServerStrategy"
PYTHON = Path(__file__).parents[2] / ".cache" / "tensorflow" / "bin" / "python"
STRATEGIES = {
    "parameter server, asynchronous": hr.ParameterServer(2),
    "parameter server, bound 0": hr.ParameterServer(2, staleness_bound=0),
    "downpour, intervals 5": hr.Downpour(2),
    "mirrored": hr.Mirrored(2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=("mlp", "cnn"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--tensorflow", default=str(PYTHON), help="a Python that has TensorFlow; else left out")
    arguments = parser.parse_args()
    workload, seconds = arguments.workload, arguments.seconds
    with LocalEngine() as engine:
        ours = partial(throughput, workload, workers=2, seconds=seconds, engine=engine)
        ceiling = partial(rival, "ddp", "1", workload, str(seconds), copies=2, tuned=True)
        contestants = {CEILING: ceiling}
        contestants |= {name: partial(ours, strategy=strategy) for name, strategy in STRATEGIES.items()}
        others = (CEILING, TENSORFLOW) if Path(arguments.tensorflow).exists() else (CEILING,)
        if TENSORFLOW in others:
            contestants[TENSORFLOW] = partial(
                rival, "tf_parameter_server", "2", workload, str(seconds), python=arguments.tensorflow
            )
        else:
            print(f"without TensorFlow: there is no {arguments.tensorflow}; README.md says how to make it")
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{name} / {other}": ratio(figures, name, other) for other in others for name in STRATEGIES}
    report(Path(__file__).parent, workload, "examples/s", figures, ratios)


if __name__ == "__main__":
    main()

"""What is compared: strategies, tasks, numbers of workers, seeds and learning rates. To add a strategy, add a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORKERS = (1, 2, 4, 8)
SOME = WORKERS[1:]
SEEDS = (1, 2, 3)
TUNING_SEED = 0
TUNING_WORKERS = 4
RATE_STEP, RATES_AT_FIRST, MOST_RATES = 3.0, 3, 5
"""Each strategy tries the learning rate of the task, times `factor` of its row, a third of it and three times it. While
the best is the least or the greatest, it tries the next one: five at most."""


@dataclass(frozen=True)
class Row:
    """A strategy.

    Attributes:
        text: as on the command line; `{half}` stands for half of the workers.
        factor: of the task's learning rate, in the middle of the first three that are tried; by task where they differ.
        workers: numbers that it is trained with.
        tasks: those that it is trained on.
        job: what of the job is the strategy's own: "lbfgs", its optimizer, or "skewed", whose examples a worker has.
        idea: what it is, in a few words.
    """

    text: str
    idea: str
    factor: float | Mapping[str, float] = 1.0
    workers: tuple[int, ...] = WORKERS
    tasks: tuple[str, ...] = ("cnn", "lstm", "gpt")
    job: str = ""

    def factor_of(self, task: str) -> float:
        """Returns the factor of a task."""
        return self.factor if isinstance(self.factor, float) else self.factor.get(task, 1.0)


ROWS: Mapping[str, Row] = {
    "one device": Row("one_device", "the baseline", workers=(1,)),
    "mirrored": Row("mirrored", "all-reduce of gradients in every round"),
    "central storage": Row("central_storage", "one copy of the parameters, on one host"),
    "fully sharded": Row("fully_sharded", "parameters, gradients and state in parts"),
    "pipeline": Row("pipeline", "layers in stages, micro-batches"),
    "tensor parallel": Row("tensor_parallel", "each layer in slices"),
    "context parallel": Row("context_parallel", "each sequence in pieces"),
    "expert parallel": Row("expert_parallel", "the experts of a mixture divided"),
    "mirrored x tensor": Row("hybrid(mirrored({half}), tensor_parallel(2))", "replicas of two slices", workers=SOME),
    "servers, lock-step": Row("parameter_server(staleness_bound=0)", "servers that wait for all"),
    "servers, bound 2": Row("parameter_server(staleness_bound=2)", "at most 2 rounds ahead"),
    "servers, asynchronous": Row("parameter_server", "servers that apply each gradient when it comes"),
    "four servers": Row("parameter_server(servers=4)", "asynchronous, the parameters on four servers"),
    "servers, int8": Row("parameter_server(push_codec='int8')", "asynchronous, gradients in 8 bits"),
    "servers, one spare": Row("parameter_server(backup_workers=1)", "a round drops its latest gradient", workers=SOME),
    "Downpour": Row("downpour", "sums of 5 gradients, the paper's rule", factor=1 / 3),
    "Downpour, local optimizer": Row("downpour(local='optimizer')", "the movement of 5 steps"),
    "Sandblaster": Row("sandblaster", "L-BFGS on servers", job="lbfgs"),
    "local SGD, 5": Row("local_sgd(period=5)", "mean of the parameters every 5 rounds"),
    "local SGD, 20": Row("local_sgd(period=20)", "every 20 rounds"),
    "local Adam, 20": Row("local_adam(period=20)", "the optimizers' state averaged, too"),
    "averaging by a server": Row("parameter_averaging(period=20, via='server')", "the same through a server"),
    "DiLoCo, 20": Row("diloco(period=20)", "an outer step with Nesterov's momentum"),
    "EASGD, 20": Row("easgd(period=20)", "workers and their centre attract each other"),
    "SlowMo, 20": Row("parameter_averaging(period=20, outer='slow_mo')", "slow momentum in units of the learning rate"),
    "FedAvg, 5": Row("fed_avg", "a new optimizer after every mean"),
    "FedAvg, skewed": Row("fed_avg", "20 clients of few classes", tasks=("cnn",), job="skewed"),
    "FedProx, skewed": Row("fed_prox(proximal=0.1)", "held near where they began", tasks=("cnn",), job="skewed"),
    "FedAdam, skewed": Row("fed_avg(outer='fed_adam')", "Adam on the server", tasks=("cnn",), job="skewed"),
    "PowerSGD, rank 2": Row("aggregated(by='power_sgd(rank=2)')", "gradients as two thin matrices"),
    "top-k, 1 %": Row("aggregated(by='top_k(share=0.01)')", "the largest elements of the gradients"),
    "signSGD": Row("aggregated(by='sign_sgd')", "one bit an element, and the majority", factor={"cnn": 1 / 60}),
    "gradients, int8": Row("aggregated(by='int8')", "gradients in 8 bits, with error feedback"),
    "trimmed mean": Row("aggregated(by='trimmed_mean')", "without the extremes of each element", workers=(4, 8)),
    "AD-PSGD": Row("ad_psgd(meet_every=20)", "mean with one other worker, asynchronously"),
    "Hogwild": Row("hogwild(meet_every=20)", "one copy of the parameters, no locks"),
    "gossip, ring": Row("gossip", "mean with two neighbours in every round"),
    "gossip, random": Row("gossip(topology='random')", "mean with one other worker, drawn anew"),
    "unconnected": Row("unconnected", "each on its share alone: the floor"),
}  # fmt: skip
"""Every strategy by the name of its row."""

ELSEWHERE: Mapping[str, str] = {
    "multi_worker_mirrored": "another name of mirrored",
    "tpu": "its numbers are those of mirrored, and its seconds those of a device that is not simulated",
}
"""Strategies without a row, and why."""

MIXTURE_ROWS = ("one device", "mirrored", "expert parallel")
"""Of the task that has experts: it is there for `expert_parallel`."""

DRAWN = (
    "one device", "mirrored", "servers, asynchronous", "Downpour, local optimizer", "local SGD, 20", "top-k, 1 %",
    "gossip, ring", "unconnected",
)  # fmt: skip
"""Rows of the pictures, at most eight: as many as there are colours."""
DRAWN_WORKERS = 8


def rows_of(task: str) -> tuple[str, ...]:
    """Returns the names of the rows that are trained on a task."""
    return MIXTURE_ROWS if task == "mixture" else tuple(name for name, row in ROWS.items() if task in row.tasks)

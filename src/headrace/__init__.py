"""headrace trains one PyTorch model on many devices: write the model once, name a strategy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import data, metrics, tasks
    from headrace.aggregation.gradients import GradientAggregation
    from headrace.aggregation.power_sgd import PowerSGD
    from headrace.aggregation.robust import TrimmedMean, WorkerMean
    from headrace.aggregation.sign_sgd import SignSGD
    from headrace.aggregation.top_k import TopK
    from headrace.api.adapters.lightning import from_lightning
    from headrace.api.adapters.optimizer import optimizer_like
    from headrace.api.adapters.trainer import from_trainer
    from headrace.api.comparison import Comparison, compare
    from headrace.api.fit import fit, launch
    from headrace.api.model_profile import profile
    from headrace.api.plain_script.processes import ScriptProcesses
    from headrace.api.plain_script.setup import processes, setup
    from headrace.api.probes.model_summary import ModelSummary, summary
    from headrace.api.rehearsal.rehearse import Rehearsal, rehearse
    from headrace.api.run import Run
    from headrace.api.trials.goal_rehearsal import rehearse_goal
    from headrace.api.trials.goals import steps_to_goal
    from headrace.api.trials.learning_rate import LearningRates, find_learning_rate
    from headrace.api.verification.verification import Verification
    from headrace.api.verification.verify import verify
    from headrace.averaging.outer_steps import Elastic, FedAdagrad, FedAdam, FedYogi, Momentum, Nesterov, OuterStep
    from headrace.averaging.slow_mo import SlowMo
    from headrace.engine.ray.engine import RayEngine
    from headrace.engine.threads import ThreadEngine
    from headrace.losses import linear_cross_entropy
    from headrace.metrics import Mean
    from headrace.modules import frozen
    from headrace.parameter_server.server.optimizer import Remedies
    from headrace.parameter_server.sparse.planning import RowOptions
    from headrace.policies.period import AutoPeriod
    from headrace.prediction.assumptions import Assumptions
    from headrace.prediction.calibration import calibrate
    from headrace.prediction.memory.plan import MemoryPlan
    from headrace.prediction.recommendation.goals import recommend_for_goal
    from headrace.prediction.recommendation.recommend import Recommendation, recommend
    from headrace.prediction.simulation.simulate import Prediction, simulate
    from headrace.report.trackers.mlflow import MLflow
    from headrace.report.trackers.tensorboard import TensorBoard
    from headrace.report.trackers.wandb import WandB
    from headrace.spec.cluster import Cluster
    from headrace.spec.compute import StepsToGoal
    from headrace.spec.job import Job
    from headrace.spec.model import ModelSpec
    from headrace.spec.options import Checkpoints, EarlyStopping, Options
    from headrace.spec.parameter_sets import ParameterSet
    from headrace.spec.patterns import grouped
    from headrace.spec.weights import Weights
    from headrace.strategies import (
        ADPSGD,
        EASGD,
        TPU,
        Aggregated,
        CentralStorage,
        ContextParallel,
        DiLoCo,
        Downpour,
        ExpertParallel,
        FedAvg,
        FedProx,
        FullySharded,
        Gossip,
        Hogwild,
        Hybrid,
        LocalAdam,
        LocalSGD,
        Mirrored,
        MultiWorkerMirrored,
        OneDevice,
        ParameterAveraging,
        ParameterServer,
        Pipeline,
        Sandblaster,
        Strategy,
        TensorParallel,
        Unconnected,
    )
    from headrace.training.embeddings.optimizers import LazyAdam, RowwiseAdagrad
    from headrace.training.embeddings.vocabulary.limit import limit_rows
    from headrace.worker.callbacks.callback import Callback, Moment
    from headrace.worker.worker import Worker

__all__ = [
    "ADPSGD",
    "EASGD",
    "TPU",
    "Aggregated",
    "Assumptions",
    "AutoPeriod",
    "Callback",
    "CentralStorage",
    "Checkpoints",
    "Cluster",
    "Comparison",
    "ContextParallel",
    "DiLoCo",
    "Downpour",
    "EarlyStopping",
    "Elastic",
    "ExpertParallel",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedYogi",
    "FullySharded",
    "Gossip",
    "GradientAggregation",
    "Hogwild",
    "Hybrid",
    "Job",
    "LazyAdam",
    "LearningRates",
    "LocalAdam",
    "LocalSGD",
    "MLflow",
    "Mean",
    "MemoryPlan",
    "Mirrored",
    "ModelSpec",
    "ModelSummary",
    "Moment",
    "Momentum",
    "MultiWorkerMirrored",
    "Nesterov",
    "OneDevice",
    "Options",
    "OuterStep",
    "ParameterAveraging",
    "ParameterServer",
    "ParameterSet",
    "Pipeline",
    "PowerSGD",
    "Prediction",
    "RayEngine",
    "Recommendation",
    "Rehearsal",
    "Remedies",
    "RowOptions",
    "RowwiseAdagrad",
    "Run",
    "Sandblaster",
    "ScriptProcesses",
    "SignSGD",
    "SlowMo",
    "StepsToGoal",
    "Strategy",
    "TensorBoard",
    "TensorParallel",
    "ThreadEngine",
    "TopK",
    "TrimmedMean",
    "Unconnected",
    "Verification",
    "WandB",
    "Weights",
    "Worker",
    "WorkerMean",
    "calibrate",
    "compare",
    "data",
    "find_learning_rate",
    "fit",
    "from_lightning",
    "from_trainer",
    "frozen",
    "grouped",
    "launch",
    "limit_rows",
    "linear_cross_entropy",
    "metrics",
    "optimizer_like",
    "processes",
    "profile",
    "recommend",
    "recommend_for_goal",
    "rehearse",
    "rehearse_goal",
    "setup",
    "simulate",
    "steps_to_goal",
    "summary",
    "tasks",
    "verify",
]

# Where each name is imported from when it is first used: `import headrace` alone does not import torch.
_MODULES = {
    "averaging.slow_mo": ("SlowMo",),
    "aggregation.robust": ("TrimmedMean", "WorkerMean"),
    "aggregation.sign_sgd": ("SignSGD",),
    "aggregation.top_k": ("TopK",),
    "aggregation.power_sgd": ("PowerSGD",),
    "aggregation.gradients": ("GradientAggregation",),
    "api.adapters.lightning": ("from_lightning",),
    "api.adapters.optimizer": ("optimizer_like",),
    "api.adapters.trainer": ("from_trainer",),
    "api.comparison": ("Comparison", "compare"),
    "api.fit": ("fit", "launch"),
    "api.model_profile": ("profile",),
    "api.trials.goal_rehearsal": ("rehearse_goal",),
    "api.trials.goals": ("steps_to_goal",),
    "api.trials.learning_rate": ("LearningRates", "find_learning_rate"),
    "api.probes.model_summary": ("ModelSummary", "summary"),
    "api.rehearsal.rehearse": ("Rehearsal", "rehearse"),
    "api.run": ("Run",),
    "api.verification.verification": ("Verification",),
    "api.verification.verify": ("verify",),
    "api.plain_script.processes": ("ScriptProcesses",),
    "api.plain_script.setup": ("processes", "setup"),
    "averaging.outer_steps": ("Elastic", "FedAdagrad", "FedAdam", "FedYogi", "Momentum", "Nesterov", "OuterStep"),
    "engine.ray.engine": ("RayEngine",),
    "engine.threads": ("ThreadEngine",),
    "losses": ("linear_cross_entropy",),
    "metrics": ("Mean",),
    "modules": ("frozen",),
    "parameter_server.server.optimizer": ("Remedies",),
    "parameter_server.sparse.planning": ("RowOptions",),
    "policies.period": ("AutoPeriod",),
    "prediction.memory.plan": ("MemoryPlan",),
    "prediction.calibration": ("calibrate",),
    "prediction.recommendation.goals": ("recommend_for_goal",),
    "prediction.recommendation.recommend": ("Recommendation", "recommend"),
    "prediction.assumptions": ("Assumptions",),
    "prediction.simulation.simulate": ("Prediction", "simulate"),
    "report.trackers.mlflow": ("MLflow",),
    "report.trackers.tensorboard": ("TensorBoard",),
    "report.trackers.wandb": ("WandB",),
    "spec.cluster": ("Cluster",),
    "spec.compute": ("StepsToGoal",),
    "spec.job": ("Job",),
    "spec.model": ("ModelSpec",),
    "spec.options": ("Checkpoints", "EarlyStopping", "Options"),
    "spec.parameter_sets": ("ParameterSet",),
    "spec.patterns": ("grouped",),
    "spec.weights": ("Weights",),
    "training.embeddings.optimizers": ("LazyAdam", "RowwiseAdagrad"),
    "training.embeddings.vocabulary.limit": ("limit_rows",),
    "worker.callbacks.callback": ("Callback", "Moment"),
    "worker.worker": ("Worker",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__ and not name[:1].isupper():
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    # Before anything is imported that an older torch lacks.
    importlib.import_module("headrace.machine.versions").require_torch()
    if name in ("data", "metrics", "tasks"):
        return importlib.import_module(f"headrace.{name}")
    # All others are strategies; an added one is here by its line in the table, or by its package's entry point.
    return getattr(importlib.import_module(f"headrace.{_HOMES.get(name, 'strategies')}"), name)


def __dir__() -> list[str]:
    return __all__

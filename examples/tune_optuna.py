"""Optuna chooses learning rate and width, and ends a trial that is worse than the median of those before it.

pip install optuna && python examples/tune_optuna.py
"""

import functools

import optuna
from torch import nn, optim

import headrace as hr


def objective(trial):
    width, lr = trial.suggest_int("width", 16, 128, log=True), trial.suggest_float("lr", 1e-3, 1.0, log=True)
    digits = hr.data.digits()
    job = hr.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)),
        optimizer=functools.partial(optim.SGD, lr=lr, momentum=0.9),
        task=hr.tasks.multiclass(10),
        data=digits.train,
        eval_data=digits.test,
        global_batch_size=64,
        epochs=5,
    )

    def report(event):
        if event.kind == "evaluated":
            trial.report(event.metrics["loss"], event.epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

    return hr.fit(job, hr.Mirrored(workers=2), on_event=report).metrics["loss"]


pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
study.optimize(objective, n_trials=12)
ended = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
print(f"{ended} of {len(study.trials)} trials ended early; the best has {study.best_params}: {study.best_value:.3f}")

"""Optuna chooses learning rate and width, and ends a trial that is worse than the median of those before it.

pip install optuna && python examples/tune_optuna.py
"""

import functools

import optuna
import torch

import headrace as hr


def model(width):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def objective(trial):
    def report(event):
        if event.kind == "evaluated":
            trial.report(event.metrics["loss"], event.epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

    job = hr.Job(
        model=functools.partial(model, trial.suggest_int("width", 16, 128, log=True)),
        optimizer=functools.partial(torch.optim.SGD, lr=trial.suggest_float("lr", 1e-3, 1.0, log=True), momentum=0.9),
        task=hr.tasks.multiclass(10),
        data=hr.data.digits().train,
        eval_data=hr.data.digits().test,
        global_batch_size=64,
        epochs=5,
    )
    return hr.fit(job, hr.Mirrored(workers=2), on_event=report).metrics["loss"]


if __name__ == "__main__":
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=12)
    ended = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(
        f"{ended} of {len(study.trials)} trials ended early; the best has {study.best_params}: {study.best_value:.3f}"
    )

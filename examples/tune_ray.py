"""Ray Tune chooses learning rate and width; ASHA ends the worse half of the trials after each of its rungs.

pip install 'ray[tune]' && python examples/tune_ray.py
"""

import functools

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import headrace as hr


def model(width):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def train(config):
    def report(event):
        if event.kind == "evaluated":
            tune.report({"loss": event.metrics["loss"]})

    job = hr.Job(
        model=functools.partial(model, config["width"]),
        optimizer=functools.partial(torch.optim.SGD, lr=config["lr"], momentum=0.9),
        task=hr.tasks.multiclass(10),
        data=hr.data.digits().train,
        eval_data=hr.data.digits().test,
        global_batch_size=64,
        epochs=4,
    )
    hr.fit(job, hr.OneDevice(threads=1), on_event=report)


if __name__ == "__main__":
    space = {"lr": tune.loguniform(1e-3, 1.0), "width": tune.choice([16, 32, 64, 128])}
    halving = ASHAScheduler(metric="loss", mode="min", max_t=4, grace_period=1, reduction_factor=2)
    results = tune.Tuner(train, param_space=space, tune_config=tune.TuneConfig(num_samples=6, scheduler=halving)).fit()
    best = results.get_best_result("loss", "min")
    lengths = sorted(result.metrics["training_iteration"] for result in results)
    print(f"epochs of the trials: {lengths}; the best has {best.config}: {best.metrics['loss']:.3f}")

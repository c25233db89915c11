"""Ray Tune chooses learning rate and width; ASHA ends the worse half of the trials after each of its rungs.

pip install 'ray[tune]' && python examples/tune_ray.py
"""

import functools

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn, optim

import headrace as hr


def train(config):
    width, lr = config["width"], config["lr"]
    digits = hr.data.digits()
    job = hr.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)),
        optimizer=functools.partial(optim.SGD, lr=lr, momentum=0.9),
        task=hr.tasks.multiclass(10),
        data=digits.train,
        eval_data=digits.test,
        global_batch_size=64,
        epochs=4,
    )

    def report(event):
        if event.kind == "evaluated":
            tune.report({"loss": event.metrics["loss"]})

    hr.fit(job, hr.OneDevice(threads=1), on_event=report)


space = {"lr": tune.loguniform(1e-3, 1.0), "width": tune.choice([16, 32, 64, 128])}
halving = ASHAScheduler(metric="loss", mode="min", max_t=4, grace_period=1, reduction_factor=2)
results = tune.Tuner(train, param_space=space, tune_config=tune.TuneConfig(num_samples=6, scheduler=halving)).fit()
best = results.get_best_result("loss", "min")
lengths = sorted(result.metrics["training_iteration"] for result in results)
print(f"epochs of the trials: {lengths}; the best has {best.config}: {best.metrics['loss']:.3f}")

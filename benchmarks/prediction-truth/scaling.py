"""Tables of data parallelism: TensorFlow's benchmarks, Horovod, Goyal et al."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rows import PUBLISHED, Row, fit, whole

from headrace.prediction.simulation.scene import Assumptions
from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec
from headrace.strategies import Mirrored

PARAMETERS = {
    "inception3": 23.8e6,
    "resnet50": 25.6e6,
    "resnet101": 44.5e6,
    "resnet152": 60.2e6,
    "alexnet": 61.1e6,
    "vgg16": 138.4e6,
}
OPERATIONS = {"resnet50": 4.1, "resnet101": 7.8, "resnet152": 11.5}
"""GMAC of a forward pass at 224 x 224."""
_STEPS = 20


def tensorflow() -> Iterator[Row]:
    """TensorFlow's benchmarks, May 2017: gradients are exchanged when backward is over.

    The constant of a machine type is fitted to the row with the most parameter bytes a second. On the DGX-1 it is the
    rate between its two groups of four GPUs, inside which each GPU has two NVLinks of 20 GB/s to others in a ring; on
    the K80 machine, of all GPUs of the host.
    """
    for machine in ("dgx1_p100", "gce_k80"):
        table = PUBLISHED["tf_benchmarks_2017"][machine]
        yield from _synthetic(machine, table)
        missing = "the rate at which the machine reads and decodes images"
        for key in ("real", "real_b32"):
            for name, rates in table.get(key, {}).items():
                for count in ("2", "4", "8"):
                    case = f"{machine} {name}, {count} GPUs"
                    if rates[count] is not None:
                        yield Row("TF benchmarks, real data", case, rates[count], None, missing)


def _synthetic(machine: str, table: dict[str, Any]) -> Iterator[Row]:
    cases = [
        (name, 32 if key.endswith("b32") else table["batch"][name], rates)
        for key in ("synthetic", "synthetic_b32")
        for name, rates in table[key].items()
    ]

    def predicted(case: tuple[str, int, dict[str, float]], count: int, constant: float) -> float:
        name, batch, rates = case
        model = whole(PARAMETERS[name], batch, batch / rates["1"])
        return _tensorflow_rate(machine, model, batch, count, constant)

    fastest = max(cases, key=lambda case: PARAMETERS[case[0]] * case[2]["1"] / case[1])
    constant = fit(lambda rate: predicted(fastest, 8, rate), fastest[2]["8"], 1e8, 1e12)
    for case in cases:
        name, batch, rates = case
        for count in (2, 4, 8):
            text = f"{machine} {name} b{batch}, {count} GPUs ({constant / 1e9:.2f} GB/s)"
            fitted = count == 8 and case is fastest
            yield Row("TF benchmarks", text, rates[str(count)], predicted(case, count, constant), fitted=fitted)


def _tensorflow_rate(machine: str, model: ModelSpec, batch: int, count: int, constant: float) -> float:
    if machine == "gce_k80":
        hosts = [_host("k80", 8, constant)]
        cluster = Cluster(tuple(hosts), device="cuda")
    else:
        cluster = Cluster((_host("quad0", 4, 40e9), _host("quad1", 4, 40e9)), device="cuda", link_bytes_per_s=constant)
    return _rate(model, cluster, count, batch, overlap=False)


def horovod() -> Iterator[Row]:
    """Horovod on 32 servers of 4 Pascal GPUs, 25 Gbit/s RoCE: a ring of all GPUs, buckets of 64 MB, with overlap.

    The one-GPU rates are TensorFlow's of the P100; ResNet-101's lies between ResNet-50's and -152's by its operations.
    The constant is the part of the line that NCCL attains, fitted to VGG-16.
    """
    published = PUBLISHED["horovod"]
    known = PUBLISHED["tf_benchmarks_2017"]["dgx1_p100"]["synthetic"]
    seconds = {name: 1 / rates["1"] for name, rates in known.items()}
    place = (OPERATIONS["resnet101"] - OPERATIONS["resnet50"]) / (OPERATIONS["resnet152"] - OPERATIONS["resnet50"])
    seconds["resnet101"] = seconds["resnet50"] + place * (seconds["resnet152"] - seconds["resnet50"])
    models = {name: whole(PARAMETERS[name], 64, 64 * seconds[name]) for name in published["eff_128gpu"]}

    def efficiency(name: str, share: float) -> float:
        hosts = tuple(_host(f"h{index}", 4, 12e9) for index in range(32))
        cluster = Cluster(hosts, device="cuda", link_bytes_per_s=25e9 / 8)
        assumed = Assumptions(steps=_STEPS, algorithm="ring", network_share=share, bucket_bytes=64 << 20)
        return _rate(models[name], cluster, 128, 64, assumptions=assumed) * seconds[name] / 128

    share = fit(lambda share: efficiency("vgg16", share), published["eff_128gpu"]["vgg16"], 0.05, 1.0)
    for name, value in published["eff_128gpu"].items():
        case = f"{name}, 128 GPUs, efficiency ({share:.2f} of the line)"
        yield Row("Horovod", case, value, efficiency(name, share), fitted=name == "vgg16")
    missing = "what standard TensorFlow sends when, and what TCP attains of this network"
    yield Row(
        "Horovod, paper", "standard TensorFlow, 128 GPUs", published["paper_128gpu_tcp"]["standard_tf"], None, missing
    )
    missing = "the servers and the network of the example"
    yield Row("Horovod, docs", "resnet101, 16 GPUs", published["docs_example"]["images_s"], None, missing)


def goyal() -> Iterator[Row]:
    """Goyal et al.: 8 GPUs a host, 50 Gbit/s. The constant is the spread of a GPU's step, fitted to 352 GPUs.

    The step of 8 GPUs is the epoch's 16 minutes over its 5,004 steps of 256 images.
    """
    published = PUBLISHED["goyal"]
    step_s = 16 * 60 / (1_281_167 / 256)
    model = whole(published["params"], 32, step_s, backward_s=published["backward_ms_b32"] / 1e3)

    def step_of(count: int, spread: float) -> float:
        hosts = tuple(_host(f"h{index}", 8, 20e9) for index in range(-(-count // 8)))
        cluster = Cluster(hosts, device="cuda", link_bytes_per_s=50e9 / 8)
        assumed = Assumptions(steps=100, algorithm="hierarchical", spread=spread)
        return count * 32 / _rate(model, cluster, count, 32, assumptions=assumed)

    growth = published["iter_time_growth_8_to_352_gpus"]
    spread = fit(lambda spread: step_of(352, spread) / step_of(8, spread), growth, 1e-4, 0.5)
    yield Row(
        "Goyal",
        f"step of 352 over 8 GPUs (spread {spread:.3f})",
        growth,
        step_of(352, spread) / step_of(8, spread),
        fitted=True,
    )
    yield Row(
        "Goyal", "efficiency of 256 over 8 GPUs", published["eff_8_to_256"], step_of(8, spread) / step_of(256, spread)
    )


def _host(name: str, devices: int, bus_bytes_per_s: float) -> Host:
    names = tuple(f"cuda:{index}" for index in range(devices))
    return Host(name, 8, 0, names, bus_bytes_per_s=bus_bytes_per_s)


def _rate(
    model: ModelSpec,
    cluster: Cluster,
    count: int,
    batch: int,
    overlap: bool = True,
    assumptions: Assumptions | None = None,
) -> float:
    """Returns the images a second."""
    assumed = assumptions or Assumptions(steps=_STEPS)
    strategy = Mirrored(workers=count, overlap=overlap)
    return simulate(model, cluster, strategy, global_batch_size=count * batch, assumptions=assumed).examples_per_s

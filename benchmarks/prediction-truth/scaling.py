"""Tables of data parallelism: TensorFlow's benchmarks, Horovod, Goyal et al."""

from __future__ import annotations

from collections.abc import Iterator

from rows import PUBLISHED, Row, whole

from headrace.prediction.assumptions import Assumptions
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

    The DGX-1's P100s have links of 20 GB/s: a ring of four goes over two at a time, and one of eight over one where it
    leaves a group of four. Nothing says how the K80s are connected, so that the simulator's own figure counts.
    """
    for machine, buses in (("dgx1_p100", {2: 40e9, 4: 40e9, 8: 20e9}), ("gce_k80", {})):
        table = PUBLISHED["tf_benchmarks_2017"][machine]
        for key in ("synthetic", "synthetic_b32"):
            for name, rates in table[key].items():
                batch = 32 if key.endswith("b32") else table["batch"][name]
                model = whole(PARAMETERS[name], batch, batch / rates["1"])
                for count in (2, 4, 8):
                    host = _host(machine, 8, buses.get(count, Host.bus_bytes_per_s))
                    cluster = Cluster((host,), device="cuda")
                    predicted = _rate(model, cluster, count, batch, overlap=False)
                    yield Row("TF benchmarks", f"{machine} {name} b{batch}, {count} GPUs", rates[str(count)], predicted)
        missing = "the rate at which the machine reads and decodes images"
        for key in ("real", "real_b32"):
            for name, rates in table.get(key, {}).items():
                for count in ("2", "4", "8"):
                    case = f"{machine} {name}, {count} GPUs"
                    if rates[count] is not None:
                        yield Row("TF benchmarks, real data", case, rates[count], None, missing)


def horovod() -> Iterator[Row]:
    """Horovod on 32 servers of 4 Pascal GPUs, 25 Gbit/s RoCE: buckets of 64 MB, with overlap.

    The one-GPU rates are TensorFlow's of the P100; ResNet-101's lies between ResNet-50's and -152's by its operations.
    """
    published = PUBLISHED["horovod"]
    known = PUBLISHED["tf_benchmarks_2017"]["dgx1_p100"]["synthetic"]
    seconds = {name: 1 / rates["1"] for name, rates in known.items()}
    place = (OPERATIONS["resnet101"] - OPERATIONS["resnet50"]) / (OPERATIONS["resnet152"] - OPERATIONS["resnet50"])
    seconds["resnet101"] = seconds["resnet50"] + place * (seconds["resnet152"] - seconds["resnet50"])
    models = {name: whole(PARAMETERS[name], 64, 64 * seconds[name]) for name in published["eff_128gpu"]}

    hosts = tuple(_host(f"h{index}", 4, 12e9) for index in range(32))
    cluster = Cluster(hosts, device="cuda", link_bytes_per_s=25e9 / 8, rdma=True)
    assumed = Assumptions(steps=_STEPS, bucket_bytes=64 << 20)
    for name, value in published["eff_128gpu"].items():
        predicted = _rate(models[name], cluster, 128, 64, assumptions=assumed) * seconds[name] / 128
        yield Row("Horovod", f"{name}, 128 GPUs, efficiency", value, predicted)
    missing = "what standard TensorFlow sends when, and what TCP attains of this network"
    yield Row(
        "Horovod, paper", "standard TensorFlow, 128 GPUs", published["paper_128gpu_tcp"]["standard_tf"], None, missing
    )
    missing = "the servers and the network of the example"
    yield Row("Horovod, docs", "resnet101, 16 GPUs", published["docs_example"]["images_s"], None, missing)


def goyal() -> Iterator[Row]:
    """Goyal et al.: 8 GPUs a host, 50 Gbit/s.

    The step of 8 GPUs is the epoch's 16 minutes over its 5,004 steps of 256 images, which eight have lost something to
    each other in already.
    """
    published = PUBLISHED["goyal"]
    step_s = 16 * 60 / (1_281_167 / 256)
    model = whole(published["params"], 32, step_s, backward_s=published["backward_ms_b32"] / 1e3)

    def step_of(count: int) -> float:
        hosts = tuple(_host(f"h{index}", 8, 20e9) for index in range(-(-count // 8)))
        cluster = Cluster(hosts, device="cuda", link_bytes_per_s=50e9 / 8, rdma=True)
        return count * 32 / _rate(model, cluster, count, 32, assumptions=Assumptions(algorithm="hierarchical"))

    growth = published["iter_time_growth_8_to_352_gpus"]
    yield Row("Goyal", "step of 352 over 8 GPUs", growth, step_of(352) / step_of(8))
    yield Row("Goyal", "efficiency of 256 over 8 GPUs", published["eff_8_to_256"], step_of(8) / step_of(256))


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

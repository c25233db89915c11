"""Tables of pipelines: Zero Bubble, GPipe, torchgpipe, and PipeDream's plans."""

from __future__ import annotations

from collections.abc import Iterator

from rows import PUBLISHED, Row, layered

from headrace.pipeline.schedules import SCHEDULES
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.simulation.simulate import simulate
from headrace.prediction.simulation.sweep import StageTimes, bubble_rate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec
from headrace.strategies import Pipeline

_ZERO_BUBBLE = {"1F1B": "1f1b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}


def zero_bubble() -> Iterator[Row]:
    """Zero Bubble's tables: bubble rates of schedules, from the times of the passes; nothing is fitted."""
    for row in PUBLISHED["zero_bubble"]["rows"]:
        stage = StageTimes(row["T_F"], row["T_B"], row["T_W"], row["T_comm"])
        for name, published in row["bubble"].items():
            case = f"{row['model']}, p = {row['p']}, m = {row['m']}, {name}"
            schedule = _ZERO_BUBBLE.get(name)
            if schedule is None:
                why = "stages a rank" if name == "1F1B-I" else "the order that their search found"
                yield Row("Zero Bubble", case, published, None, why)
                continue
            yield Row("Zero Bubble", case, published, bubble_rate(SCHEDULES[schedule](row["p"], row["m"]), stage))


def gpipe() -> Iterator[Row]:
    """GPipe's tables 2 and 3, M = 32, over 2 stages: layers of a transformer are equal; nothing is fitted."""
    published = PUBLISHED["gpipe"]
    second, third = published["table2"], published["table3_p100_no_nvlink_M32"]
    missing = "the times of AmoebaNet's layers"
    for place, stages in enumerate(published["K"]):
        base = _gpipe_rate(48, 2, 1)
        yield Row(
            "GPipe, table 2",
            f"transformer-48, K = {stages}",
            second["transformer48"]["M32"][place],
            _gpipe_rate(48, stages, 32) / base,
        )
        yield Row(
            "GPipe, table 2", f"amoebanet-d, K = {stages}", second["amoebanet_d_18_256"]["M32"][place], None, missing
        )
        for model in ("transformer48", "amoebanet_d_18_256"):
            for count in ("M1", "M4"):
                why = "the batch, which was adjusted to the memory"
                if (stages, count) != (2, "M1"):
                    yield Row(
                        "GPipe, table 2", f"{model}, K = {stages}, {count}", second[model][count][place], None, why
                    )
        if stages > 2:
            predicted = _gpipe_rate(24, stages, 32) / _gpipe_rate(24, 2, 32)
            yield Row("GPipe, table 3", f"transformer-24, K = {stages}", third["transformer24"][place], predicted)
            yield Row("GPipe, table 3", f"amoebanet-d, K = {stages}", third["amoebanet_d_18_128"][place], None, missing)


def _gpipe_rate(layers: int, stages: int, micro_batches: int) -> float:
    model = layered([LayerSpec(f"l{place}", (), 0, 1e-3, 2e-3, 0, 0) for place in range(layers)], 32)
    return _rate(model, stages, micro_batches, 32, "always", "auto", 1e12)


def torchgpipe() -> Iterator[Row]:
    """torchgpipe's ResNet-101 on P40s: layers take what their operations and bytes say, at the rate of one P40.

    The published one-GPU rate scales all layers; P40: 11.76 TFLOP/s, 346 GB/s, PCIe 3.0 x 16. Nothing is fitted.
    """
    published = PUBLISHED["torchgpipe"]["resnet101"]
    yield Row("torchgpipe", "resnet101, baseline, which gives the rate", published["baseline"]["thr"], None, "an input")
    for stages in (1, 2, 4, 8):
        row = published[f"pipeline-{stages}"]
        layers = resnet101(1 / published["baseline"]["thr"])
        rate = _rate(layered(layers, 1), stages, row["chunks"], row["batch"], "except_last", row["balance"], 15.75e9)
        yield Row("torchgpipe", f"resnet101, pipeline-{stages}", row["thr"], rate)
    for case, row in PUBLISHED["torchgpipe"]["amoebanet_d_18_256"].items():
        yield Row("torchgpipe", f"amoebanet-d, {case}", row["thr"], None, "the times of AmoebaNet's layers")


def resnet101(seconds: float) -> list[LayerSpec]:
    """Returns the 370 layers of torchgpipe's sequential ResNet-101, which take `seconds` an image together."""
    sizes: list[tuple[float, float, float]] = []

    def layer(operations: float, read: float, written: float) -> None:
        sizes.append((2 * operations / 11.76e12, 4 * (read + written) / 346e9, 4 * written))

    def convolution(channels: int, into: int, side: int, kernel: int, stride: int = 1) -> None:
        out = into * side * side
        layer(channels * kernel * kernel * out, channels * (side * stride) ** 2 + channels * into * kernel**2, out)
        layer(0, 2 * out, out)

    convolution(3, 64, 112, 7, 2)
    layer(0, 64 * 112**2, 64 * 112**2)
    layer(0, 64 * 112**2, 64 * 56**2)
    channels = 64
    for width, side, blocks in ((64, 56, 3), (128, 28, 4), (256, 14, 23), (512, 7, 3)):
        for block in range(blocks):
            first = block == 0
            inner, out = width * side * side, 4 * width * side * side
            layer(0, 0, 0)
            # The first block of a stage has its stride in the 3 x 3 convolution.
            wide = 2 if first and width > 64 else 1
            convolution(channels, width, side * wide, 1)
            layer(0, inner * wide**2, inner * wide**2)
            convolution(width, width, side, 3, wide)
            layer(0, inner, inner)
            convolution(width, 4 * width, side, 1)
            layer(channels * 4 * width * side * side if first else 0, 2 * out, out)
            layer(0, out, out)
            channels = 4 * width
    layer(0, 2048 * 49, 2048)
    layer(0, 0, 0)
    layer(2048 * 1000, 2048 * 1000, 1000)
    whole = sum(compute + moving for compute, moving, _ in sizes)
    scale = seconds / 3 / whole
    return [
        LayerSpec(f"l{place}", (), 0, scale * (compute + moving), 2 * scale * (compute + moving), 0, round(crossing))
        for place, (compute, moving, crossing) in enumerate(sizes)
    ]


def _rate(
    model: ModelSpec, stages: int, micro_batches: int, batch: int, recompute: str, partition: object, bus: float
) -> float:
    devices = tuple(f"cuda:{index}" for index in range(stages))
    cluster = Cluster((Host("gpus", 8, 0, devices, bus_bytes_per_s=bus),), device="cuda")
    strategy = Pipeline(stages, micro_batches, "gpipe", recompute, partition)  # type: ignore[arg-type]
    # Micro-batches of whole examples.
    size = batch // micro_batches * micro_batches
    return simulate(model, cluster, strategy, global_batch_size=size, assumptions=Assumptions(steps=1)).examples_per_s


def pipedream() -> Iterator[Row]:
    """PipeDream's speed-ups, which are of the time to an accuracy."""
    missing = "the epochs to that accuracy with so many machines"
    for model, machines, cluster, bsp, plan, ratio, *_ in PUBLISHED["pipedream_arxiv"]["rows"]:
        yield Row("PipeDream", f"{model}, {machines} machines {cluster}, BSP over 1 machine", bsp, None, missing)
        yield Row(
            "PipeDream", f"{model}, {machines} machines {cluster}, plan {plan} over 1 machine", ratio, None, missing
        )


Stages = tuple[tuple[int, int, int], ...]
"""First layer, stop, and replicas of each stage."""


def plans() -> Iterator[tuple[str, str, str, float, float]]:
    """Yields the case, PipeDream's published plan and ours, and the time of a minibatch under the best of each.

    Layers are of the published profile (batch 128, scaled to 32 images), on cluster A slower by the ratio of the GPUs'
    published times. Stages are chosen by PipeDream's recurrence over replicated stages (section 3.2).
    """
    profile = PUBLISHED["pipedream_vgg16_profile"]
    for _, machines, cluster, _, published, *_ in PUBLISHED["pipedream_arxiv"]["rows"]:
        # VGG-16, 16 images: 128.62 ms on a Titan X (Pascal); 128 images: 672.5 ms by this profile.
        slower = 128.62 / 16 / (672.5 / 128) if cluster == "A" else 1.0
        rate = {"A": 25e9, "B": 10e9}[cluster] / 8
        layers = [
            ((forward + backward) / 1e3 / 4 * slower, activation / 4 / rate, size / rate)
            for _, forward, backward, activation, size in profile["layers"]
        ]
        counts = [int(count) for count in published.split("-")]
        ours_s, ours = _best(layers, machines)
        theirs_s = _best_with(layers, counts)
        text = "-".join(str(replicas) for *_, replicas in ours)
        yield f"VGG-16, {machines} machines, cluster {cluster}", published, text, theirs_s, ours_s


def _stage(layers: list[tuple[float, float, float]], start: int, stop: int, replicas: int) -> float:
    compute = sum(layer[0] for layer in layers[start:stop])
    weights = sum(layer[2] for layer in layers[start:stop])
    return max(compute, 4 * (replicas - 1) / replicas * weights) / replicas


def _best(layers: list[tuple[float, float, float]], machines: int) -> tuple[float, Stages]:
    best: dict[tuple[int, int], tuple[float, Stages]] = {}
    count = len(layers)
    for stop in range(1, count + 1):
        for used in range(1, machines + 1):
            options = [(_stage(layers, 0, stop, used), ((0, stop, used),))]
            for start in range(1, stop):
                for behind in range(1, used):
                    before, stages = best[start, used - behind]
                    slowest = max(before, 2 * layers[start - 1][1], _stage(layers, start, stop, behind))
                    options.append((slowest, (*stages, (start, stop, behind))))
            best[stop, used] = min(options, key=lambda each: each[0])
    return best[count, machines]


def _best_with(layers: list[tuple[float, float, float]], replicas: list[int]) -> float:
    """Returns the time of the best cuts with these replicas."""
    count = len(layers)
    best = {stop: _stage(layers, 0, stop, replicas[0]) for stop in range(1, count + 1)}
    for own in replicas[1:]:
        best = {
            stop: min(
                (
                    max(best[start], 2 * layers[start - 1][1], _stage(layers, start, stop, own))
                    for start in best
                    if start < stop
                ),
                default=float("inf"),
            )
            for stop in range(2, count + 1)
        }
    return best[count]

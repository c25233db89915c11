"""What a step takes devices that divide each layer, and what they sum meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.errors import UsageError
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.timeline import Timeline
from headrace.spec.compute import BatchProfile, LayerSpec, SlicedProfile
from headrace.spec.model import ModelSpec


def device_steps(scene: Scene, by_speed: bool = False) -> list[DeviceStep]:
    """Returns what a step of each worker takes, or of each replica's slowest."""
    ranks = scene.workers // scene.replicas
    known: dict[tuple[str, int], DeviceStep] = {}
    slowest = []
    for replica, share in enumerate(scene.shares(by_speed)):
        hosts = scene.hosts[replica * ranks : (replica + 1) * ranks]
        for host in hosts:
            if (host.name, share) not in known:
                known[host.name, share] = scene.step(host, share)
        steps = (known[host.name, share] for host in hosts)
        slowest.append(max(steps, key=lambda step: step.forward_s + step.backward_s))
    return slowest


def sliced(model: ModelSpec, devices: int) -> SlicedProfile:
    """Returns what slices for so many devices are: as tried on the nearest number of devices; or as assumed.

    Without a trial each layer is taken to be divided evenly, and each pair of layers to need a sum of its output in
    forward, and one in backward (Megatron's columns, then rows).

    Raises:
        UsageError: the layers are not known, either.
    """
    if model.slices:
        near = min(model.slices, key=lambda each: (abs(each.devices - devices), each.devices))
        if near.devices == devices:
            return near

        def scaled(share: float) -> float:
            # What is whole on each device stays so.
            whole = max(0.0, (share * near.devices - 1) / (near.devices - 1))
            return whole + (1 - whole) / devices

        return replace(near, devices=devices, held=scaled(near.held), computed=scaled(near.computed))
    batch = model.compute.batches[-1] if model.compute else None
    if batch is None or not batch.layers:
        raise UsageError(
            "tensor_parallel exchanges what is between layers, and the model's file has no layers; profile the "
            "model, or write [[layers]]"
        )
    summed = 2 * sum(layer.crossing_bytes for layer in batch.layers[1::2]) / batch.examples
    return SlicedProfile(devices, 1 / devices, 1 / devices, summed)


def slices_note(model: ModelSpec, devices: int) -> str:
    """Returns what is assumed of slices; "" where they were tried."""
    if not model.slices:
        return "layers that are divided evenly, of which each second one's output is summed (profile tries them)"
    tried = [each.devices for each in model.slices]
    return "" if devices in tried else f"slices over {devices} devices as over {', '.join(map(str, tried))}"


def inside_ways(scene: Scene, devices: int) -> Iterator[Way]:
    """Yields the way of a sum among the devices of each group that divides layers."""
    for first in range(0, len(scene.hosts), devices):
        hosts = scene.hosts[first : first + devices]
        yield scene.network.all_reduce(hosts, scene.assumptions.algorithm)


def sliced_steps(scene: Scene) -> Sequence[DeviceStep]:
    """Returns what a step of replicas takes whose layers are divided over devices.

    Raises:
        UsageError: the layers are not known.
    """
    devices = scene.behaviour.devices
    layout = sliced(scene.model, devices)
    found = []
    for share, step, way in zip(scene.shares(), device_steps(scene), inside_ways(scene, devices), strict=True):
        # Half of the sums are of forward.
        summed_s = sums(scene.model) * way.latency_s + way.s_per_byte * layout.summed_bytes * share
        found.append(
            DeviceStep(
                step.forward_s * layout.computed + summed_s / 2,
                step.backward_s * layout.computed + summed_s / 2,
                step.optimizer_s * layout.held,
                step.fixed_s,
            )
        )
    return found


def sums(model: ModelSpec) -> int:
    """Returns how many sums a step has: two for each pair of layers."""
    return 2 * (len(model.layers) // 2)


def with_sums(scene: Scene, timeline: Timeline, devices: int = 0, part: float = 1.0) -> Timeline:
    """Returns a timeline whose bytes have also what the devices of a replica sum; of a stage a part."""
    devices = devices or scene.behaviour.devices
    way = next(inside_ways(scene, devices))
    summed = sliced(scene.model, devices).summed_bytes * max(scene.shares()) * part
    return replace(timeline, moved_bytes=timeline.moved_bytes + 2 * way.moved * summed)


def sliced_model(model: ModelSpec, layout: SlicedProfile, way: Way) -> ModelSpec:
    """Returns the model of which a device has its slices: layers take what they take there, their sums included."""
    assert model.compute is not None
    count = max(1, len(model.layers))

    def of_layer(layer: LayerSpec, batch: BatchProfile) -> LayerSpec:
        summed_s = (sums(model) * way.latency_s + way.s_per_byte * layout.summed_bytes * batch.examples) / count / 2
        return replace(
            layer,
            parameter_bytes=round(layer.parameter_bytes * layout.held),
            forward_s=layer.forward_s * layout.computed + summed_s,
            backward_s=layer.backward_s * layout.computed + summed_s,
            saved_bytes=round(layer.saved_bytes * layout.computed),
        )

    batches = []
    for batch in model.compute.batches:
        layers = tuple(of_layer(layer, batch) for layer in batch.layers)
        forward_s, backward_s = batch.forward_s * layout.computed, batch.backward_s * layout.computed
        if layers:
            forward_s, backward_s = (sum(getattr(each, f"{n}_s") for each in layers) for n in ("forward", "backward"))
        batches.append(replace(batch, forward_s=forward_s, backward_s=backward_s, layers=layers))
    parameters = tuple(
        replace(each, shape=(round(each.elements * layout.held),)) if each.trainable else each
        for each in model.parameters
    )
    compute = replace(model.compute, batches=tuple(batches), optimizer_s=model.compute.optimizer_s * layout.held)
    return replace(model, parameters=parameters, layers=batches[-1].layers, compute=compute)

"""Buckets leave while backward runs, with the gradients that a plain backward makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from headrace.collectives.compression import Compression
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UsageError
from headrace.hooks import hooks_of
from headrace.modules import describe
from headrace.training.buckets import BucketSink, SummedUse
from headrace.training.gradients import FlatLayout


class Paths(nn.Module):
    """Layers that forward takes in the order that it is given, some of them twice or not at all."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,) * 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(10, 10, dtype=dtype) for dtype in dtypes])

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            weight = self.layers[index].weight
            x = torch.tanh(self.layers[index](x.to(weight.dtype)))
        return x.double().square().mean()


class Buckets:
    """A sink whose collective notes what leaves, and doubles it, as if two workers had the same gradients."""

    def __init__(self, module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        specs = describe(module).trainable
        self.module, self.parameters = module, list(module.parameters())
        self.sent: list[Tensor] = []
        group = ThreadCollective(ThreadGroup(1), 0)
        monkeypatch.setattr(group, "bucket_bytes", (400, 900))
        monkeypatch.setattr(group, "start_all_reduce", self._send)
        self.used = SummedUse(group, specs, torch.device("cpu"), lambda: self.sink.wait())
        # As of two workers, which know by the sum what is missing.
        monkeypatch.setattr(group, "world", 2)
        self.layout = FlatLayout(specs)
        sizes = [spec.bytes for spec in specs]
        plain = Compression("plain", self.used.region)
        self.sink = BucketSink(self.parameters, sizes, self.layout, self.used.region, self.used, group, plain)

    def _send(self, flat: Tensor, compression: Compression) -> Callable[[], None]:
        self.sent.append(flat)
        return lambda: None

    def step(self, losses: Sequence[Tensor]) -> int:
        """Sends the gradients of losses, in one pass each; returns how many tensors left before the last had ended."""
        self.sent.clear()
        for parameter in self.parameters:
            parameter.grad = None
        for loss in losses[:-1]:
            loss.backward()
            self.sink.gather()
        with self.sink.sending(first=len(losses) == 1):
            losses[-1].backward()
            early = len(self.sent)
        self.sink.store([parameter.grad for parameter in self.parameters])
        self.missing = self.used.settle()
        self.used.leave()
        self.sink.wait()
        return early

    def require(self, losses: Sequence[Tensor]) -> None:
        """Requires what a plain backward gives."""
        total: list[Tensor | None] = [None] * len(self.parameters)
        for loss in losses:
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            pairs = zip(total, found, strict=True)
            total = [new if old is None else old if new is None else old + new for old, new in pairs]
        assert self.missing == tuple(index for index, each in enumerate(total) if each is None)
        for view, gradient in zip(self.layout.views(self.used.region), total, strict=True):
            assert torch.equal(view, torch.zeros_like(view) if gradient is None else gradient)


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    return Buckets(Paths(), monkeypatch)


X = torch.linspace(-1, 1, 50).view(5, 10)


def both(buckets: Buckets, *orders: Sequence[int]) -> int:
    """Sends the gradients of micro-batches, and requires them; returns how many tensors left early."""
    early = buckets.step([buckets.module(X, order) for order in orders])
    assert not any(map(any, map(hooks_of, buckets.parameters)))
    buckets.require([buckets.module(X, order) for order in orders])
    return early


def test_all_buckets_leave_during_backward_by_one_hook_each(buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(buckets, range(4)) == 3
    hooked: list[Tensor] = []
    register = Tensor.register_post_accumulate_grad_hook
    monkeypatch.setattr(
        Tensor, "register_post_accumulate_grad_hook", lambda own, hook: (hooked.append(own), register(own, hook))[1]
    )
    assert both(buckets, range(4)) == 3
    assert len(hooked) == len(buckets.sent) == 3


def test_gradients_are_in_grad_where_they_were_sent_from(buckets: Buckets) -> None:
    both(buckets, range(4))
    for parameter, view in zip(buckets.parameters, buckets.layout.views(buckets.used.region), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    "orders",
    [
        [range(4), (3, 2, 1, 0), (3, 2, 1, 0), (1, 0, 3, 2)],
        [(0, 1, 1, 2, 3), (0, 1, 2, 3, 0), (3, 0, 1, 2, 3)],
        [(0, 1, 2), range(4), (1, 2, 3), (2,), range(4)],
    ],
    ids=["in another order", "twice", "without one"],
)
def test_a_pass_that_goes_another_way(buckets: Buckets, orders: Sequence[Sequence[int]]) -> None:
    for order in orders:
        both(buckets, order)
    # What the last pass has taught.
    both(buckets, orders[-1])
    complete = set(orders[-1]) == set(range(4))
    assert both(buckets, orders[-1]) == (3 if complete else both(buckets, orders[-1]))


def test_an_order_that_changes_is_learnt_again(buckets: Buckets) -> None:
    for order in (range(4), (3, 2, 1, 0), (3, 2, 1, 0)):
        both(buckets, order)
    assert both(buckets, (3, 2, 1, 0)) == 3


@pytest.mark.parametrize(
    "orders", [(range(4), range(4)), ((0, 1, 2), range(4), (3, 0)), (range(4), (0, 2)), ((1,), (2,), (1,))]
)
def test_of_micro_batches_the_last_backward_sends_the_sum(buckets: Buckets, orders: Sequence[Sequence[int]]) -> None:
    for _ in range(3):
        early = both(buckets, *orders)
    assert early == (3 if set(orders[-1]) == set(range(4)) else early)


def test_gradients_of_several_types(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Buckets(Paths([torch.float32, torch.float64, torch.bfloat16, torch.float32]), monkeypatch)
    for _ in range(3):
        assert both(mixed, range(4)) > 3


def test_images_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor, order: object) -> Tensor:
            return self.layer(torch.arange(192.0).view(1, 3, 8, 8)).square().mean()

    for _ in range(2):
        both(Buckets(Images(), monkeypatch), ())


def test_a_gradient_after_its_bucket_was_sent_is_refused(buckets: Buckets) -> None:
    both(buckets, range(4))
    last = buckets.parameters[-1]

    def adds(gradient: Tensor) -> None:
        assert last.grad is not None
        last.grad += 1

    handle = buckets.parameters[0].register_hook(adds)
    with pytest.raises(UsageError, match=r"use overlap=False"):
        buckets.step([buckets.module(X, range(4))])
    handle.remove()
    buckets.sink.drop()
    both(buckets, range(4))


def test_one_that_user_code_has_frozen_since(buckets: Buckets) -> None:
    both(buckets, range(4))
    for parameter in buckets.parameters[-2:]:
        parameter.requires_grad_(False)
    early = buckets.step([buckets.module(X, range(4))])
    assert (early, buckets.missing) == (0, (6, 7))


def test_a_worker_without_examples_sends_zeros(buckets: Buckets) -> None:
    both(buckets, range(4))
    buckets.sent.clear()
    buckets.sink.store_nothing()
    assert len(buckets.sent) == 3
    assert buckets.used.settle() == tuple(range(8))
    assert not buckets.used.region.any()


def test_who_has_all_gradients_does_not_wait_for_the_sum(buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    for order in ((0, 1, 2), (0, 1, 2), range(4), range(4)):
        buckets.step([buckets.module(X, order)])
    waited: list[int] = []
    monkeypatch.setattr(buckets.used, "_wait", lambda: waited.append(1))
    assert buckets.used.settle() == ()
    assert not waited


def test_what_one_of_two_workers_has_is_not_missing(buckets: Buckets) -> None:
    buckets.step([buckets.module(X, (0, 1))])
    assert buckets.missing == (4, 5, 6, 7)
    # The other one has all but the last.
    flat = buckets.sent[-1]
    flat[:7] += 1
    assert buckets.used.settle() == (7,)


def test_gradients_of_a_device_leave_for_host_memory_when_backward_is_over(buckets: Buckets) -> None:
    there, region = [each.to("meta") for each in buckets.parameters], buckets.used.region
    sizes, plain = [4] * len(there), Compression("plain", region)
    group = ThreadCollective(ThreadGroup(1), 0)
    assert not BucketSink(there, sizes, buckets.layout, region, buckets.used, group, plain).early
    assert buckets.sink.early

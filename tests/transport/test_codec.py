from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import UnknownName
from headrace.transport.codec import BLOCK, CODECS, BFloat16, Codec, Int8, Plain, codec_for

NAMES = sorted(CODECS)
FLOATS = [torch.float32, torch.float64]
OTHERS = [torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LENGTHS = st.one_of(st.integers(0, 5), st.integers(BLOCK - 2, BLOCK + 2), st.integers(0, 3 * BLOCK + 9))
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def gradients(draw: st.DrawFn) -> Tensor:
    """Tensors whose blocks differ in magnitude, with some elements that stand out, and some that are 0."""
    dtype, elements = draw(st.sampled_from(FLOATS)), draw(LENGTHS)
    generator = torch.Generator().manual_seed(draw(SEEDS))
    magnitude = 10.0 ** draw(st.integers(-44, 36))
    tensor = torch.randn(elements, generator=generator, dtype=torch.float64) * magnitude
    tensor *= 10.0 ** torch.randint(-3, 2, (elements,), generator=generator)
    tensor[torch.rand(elements, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    return tensor.to(dtype)


def encoded(codec: Codec, tensor: Tensor, residual: Tensor | None = None) -> Tensor:
    out = torch.full((codec.nbytes(tensor.numel(), tensor.dtype),), 0xAB, dtype=torch.uint8)
    codec.encode(tensor, out, residual)
    return out


def decoded(codec: Codec, data: Tensor, like: Tensor) -> Tensor:
    into = torch.full(like.shape, 77, dtype=like.dtype)
    codec.decode(data, into)
    return into


def passed(codec: Codec, tensor: Tensor, residual: Tensor | None = None) -> Tensor:
    """Returns what comes out at the other end."""
    return decoded(codec, encoded(codec, tensor, residual), tensor)


def largest_of_block(tensor: Tensor) -> Tensor:
    """Returns, for each element, the largest magnitude in its block."""
    return torch.cat([block.abs().max().expand(len(block)) for block in tensor.split(BLOCK)]).to(torch.float64)


@given(gradients())
def test_plain_is_exact(tensor: Tensor) -> None:
    assert torch.equal(passed(Plain(), tensor), tensor)


@given(gradients())
def test_bf16_is_wrong_by_at_most_a_256th_of_each_element(tensor: Tensor) -> None:
    error = (passed(BFloat16(), tensor) - tensor).double().abs()
    # Below 2**-126 there is nothing nearer than half of 2**-133; float64 is rounded twice.
    assert (error <= tensor.double().abs() / 256 * (1 + 1e-5) + 2.0**-134).all()


@given(gradients().filter(lambda tensor: tensor.numel() > 0))
def test_int8_is_wrong_by_at_most_half_a_scale_of_the_block(tensor: Tensor) -> None:
    error = (passed(Int8(), tensor) - tensor).double().abs()
    scale = largest_of_block(tensor) / 127
    # A scale has 16 bits, and a block whose scale would not be normal is 0.
    bound = torch.where(scale < SMALLEST_SCALE * (1 + 1e-6), 127 * scale, scale / 2 * (1 + 1e-4))
    assert (error <= bound).all()


@pytest.mark.parametrize("name", NAMES)
@given(tensor=gradients())
def test_what_was_decoded_passes_unchanged(name: str, tensor: Tensor) -> None:
    once = passed(CODECS[name], tensor)
    assert torch.equal(passed(CODECS[name], once), once)


@pytest.mark.parametrize("name", NAMES)
@given(tensor=gradients())
def test_the_residual_is_what_the_other_end_lacks(name: str, tensor: Tensor) -> None:
    residual = torch.zeros_like(tensor)
    assert torch.equal(passed(CODECS[name], tensor, residual), passed(CODECS[name], tensor))
    assert torch.equal(residual, tensor - passed(CODECS[name], tensor))


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, elements=LENGTHS.filter(bool), steps=st.integers(1, 12))
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent_but_for_the_last_residual(
    name: str, seed: int, elements: int, steps: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent, arrived = torch.zeros(2, elements, dtype=torch.float64)
    residual = torch.zeros_like(sent)
    for _ in range(steps):
        gradient = torch.randn(elements, generator=generator, dtype=torch.float64)
        before = gradient.clone()
        arrived += passed(CODECS[name], gradient, residual)
        sent += gradient
        assert torch.equal(gradient, before)
    assert torch.allclose(arrived + residual, sent, rtol=0, atol=1e-12)
    # It does not grow with the number of steps: values are below 7 here, their sum with a residual below 8.
    assert residual.abs().max() <= (0 if name == "plain" else 8 / 127)


@pytest.mark.parametrize("name", NAMES)
def test_a_residual_is_added_and_replaced(name: str) -> None:
    residual = torch.full((3,), 0.5)
    assert passed(CODECS[name], torch.full((3,), 127 / 128 - 0.5), residual).tolist() == [127 / 128] * 3
    assert residual.tolist() == [0, 0, 0]


def test_int8_as_drawn() -> None:
    # block 0 is up to 254, so its scale is 2; block 1 has two elements, up to 1.27 / 127
    tensor = torch.zeros(BLOCK + 2)
    tensor[:4] = torch.tensor([254.0, -254.0, 3.9, -100.0])
    tensor[BLOCK:] = torch.tensor([127 / 1024, -1 / 1024])
    data = encoded(Int8(), tensor)
    assert data.numel() == 2 * 4 + BLOCK + 2
    assert data[:8].view(torch.float32).tolist() == [2.0, 1 / 1024]
    assert data[8:].view(torch.int8).tolist() == [127, -127, 2, -50, *[0] * (BLOCK - 4), 127, -1]


@pytest.mark.parametrize(("name", "nbytes"), [("plain", 4_000), ("bf16", 2_000), ("int8", 1_016)])
def test_a_thousand_float32_are_so_many_bytes(name: str, nbytes: int) -> None:
    assert CODECS[name].nbytes(1_000, torch.float32) == nbytes
    assert CODECS[name].nbytes(0, torch.float64) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_any_shape_and_strides_is_read_in_its_order(name: str) -> None:
    tensor = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(passed(CODECS[name], tensor), passed(CODECS[name], tensor.contiguous()))
    # Its scale has few bits.
    scalar = torch.tensor(127 / 128)
    assert passed(CODECS[name], scalar).tolist() == 127 / 128


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_types_stay_plain(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    for name in NAMES:
        codec = codec_for(name, dtype)
        assert torch.equal(passed(codec, tensor), tensor)
        assert not codec.feedback
    for name in ("bf16", "int8"):
        with pytest.raises(ValueError, match=f"{name} encodes float32 and float64, not {dtype}"):
            CODECS[name].nbytes(5, dtype)


def test_codecs_have_names() -> None:
    for dtype in FLOATS:
        assert {name: type(codec_for(name, dtype)) for name in NAMES} == {
            "bf16": BFloat16,
            "int8": Int8,
            "plain": Plain,
        }
    assert [name for name in NAMES if CODECS[name].feedback] == ["int8"]
    with pytest.raises(UnknownName, match="there is no codec 'int'; did you mean 'int8'"):
        codec_for("int", torch.int64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bf16_keeps_what_is_not_finite_but_not_for_the_next_time(dtype: torch.dtype) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38, 1.001], dtype=dtype)
    residual = torch.zeros_like(tensor)
    arrived = passed(BFloat16(), tensor, residual)
    assert arrived[0].isnan()
    assert arrived[1:4].tolist() == [math.inf, -math.inf, math.inf]
    assert residual[:4].tolist() == [0, 0, 0, 0]
    assert residual[4] == tensor[4] - arrived[4]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [3, BLOCK + 1])
def test_int8_refuses_what_is_not_finite_and_leaves_the_residual(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.ones(BLOCK + 2, dtype=dtype)
    tensor[place] = bad
    residual = torch.full_like(tensor, 0.25)
    with pytest.raises(ValueError, match="int8 cannot hold NaN, infinite"):
        encoded(Int8(), tensor, residual)
    assert (residual == 0.25).all()


def test_int8_refuses_nan_whose_bits_are_the_largest() -> None:
    tensor = torch.full((BLOCK,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert tensor.isnan().all()
    with pytest.raises(ValueError, match="int8 cannot hold NaN"):
        encoded(Int8(), tensor)


def test_int8_refuses_what_becomes_infinite_with_the_residual() -> None:
    tensor = torch.full((3,), 3e38)
    with pytest.raises(ValueError, match="infinite"):
        encoded(Int8(), tensor, tensor.clone())


def test_int8_refuses_float64_without_a_scale() -> None:
    largest = torch.finfo(torch.float32).max
    assert passed(Int8(), torch.tensor([126.0 * largest], dtype=torch.float64)).isfinite()
    # The second has a scale, but it would be rounded up to infinite.
    for value in (1e300, 127 * largest):
        with pytest.raises(ValueError, match="more than 4e40"):
            encoded(Int8(), torch.tensor([value], dtype=torch.float64))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_int8_refuses_a_damaged_scale(scale: float) -> None:
    data = encoded(Int8(), torch.ones(2 * BLOCK))
    data[4:8].view(torch.float32).fill_(scale)
    with pytest.raises(ValueError, match="scales of int8 blocks are not finite"):
        Int8().decode(data, torch.empty(2 * BLOCK))


@pytest.mark.parametrize("name", NAMES)
@given(elements=LENGTHS, length=st.integers(0, 2_000))
def test_a_wrong_length_is_refused(name: str, elements: int, length: int) -> None:
    codec, tensor = CODECS[name], torch.ones(elements)
    right = codec.nbytes(elements, tensor.dtype)
    length += length == right
    data = torch.zeros(length, dtype=torch.uint8)
    for call in (codec.encode, codec.decode):
        given = (tensor, data) if call == codec.encode else (data, tensor)
        with pytest.raises(
            ValueError, match=rf"{elements} elements of torch.float32 are {right} bytes .*\({length},\)"
        ):
            call(*given)
    assert torch.equal(tensor, torch.ones(elements))
    assert not data.any()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_wrong_form_are_refused(name: str) -> None:
    codec, tensor = CODECS[name], torch.ones(8)
    right = codec.nbytes(8, tensor.dtype)
    wrong: list[Callable[[], Tensor]] = [
        lambda: torch.zeros(right, dtype=torch.int8),
        lambda: torch.zeros(1, right, dtype=torch.uint8),
        lambda: torch.zeros(right, dtype=torch.float32),
    ]
    for make in wrong:
        with pytest.raises(ValueError, match="in this codec, and there are"):
            codec.encode(tensor, make())
        with pytest.raises(ValueError, match="in this codec, and there are"):
            codec.decode(make(), tensor)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("residual", [torch.zeros(7), torch.zeros(9), torch.zeros(8, dtype=torch.float64)])
def test_the_residual_of_another_tensor_is_refused(name: str, residual: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a residual of \d torch.float\d\d does not belong to a tensor of 8"):
        encoded(CODECS[name], torch.ones(8), residual)


def descend(codec: Codec, feedback: bool, steps: int = 2_000) -> Tensor:
    """Minimizes the sum of |x - c|**2 / 2 over two workers, who disagree about the first coordinate by far.

    The gradients of that one cancel only where they meet, so each worker's scale stays large compared with what the
    second coordinate asks for.
    """
    centers = torch.tensor([[1_000.0, 1.0], [-1_000.0, 1.0]])
    residuals = torch.zeros_like(centers)
    x = torch.zeros(2)
    for step in range(steps):
        pushed = [
            passed(codec, x - center, residual if feedback else None)
            for center, residual in zip(centers, residuals, strict=True)
        ]
        x -= sum(pushed, torch.zeros(2)) / 2 / (step + 10)
    return x


@pytest.mark.slow
def test_with_feedback_int8_converges_to_the_same_point_and_without_it_stalls() -> None:
    exact, with_feedback, without = descend(Plain(), False), descend(Int8(), True), descend(Int8(), False)
    assert (exact - torch.tensor([0.0, 1.0])).abs().max() < 0.01
    assert (with_feedback - exact).abs().max() < 0.01
    assert without[1] == 0

"""A Llama-shaped language model in plain PyTorch: RMSNorm, rotary positions, grouped heads, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; heads have `width / heads` features, and keys and values `kv_heads` of them."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int


SIZES = {
    "tiny": Shape(2, 32, 64, 4, 2),
    "10m": Shape(14, 256, 704, 8, 4),
    "100m": Shape(16, 768, 2048, 12, 4),
    "350m": Shape(31, 1024, 2816, 16, 4),
    "1.5b": Shape(33, 2048, 5632, 32, 8),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.num_heads, self.num_kv_heads = shape.heads, shape.kv_heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)
        rates = 10_000.0 ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(length).float()[:, None] * rates
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x))
        )
        mixed = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        """Rotates pairs of features by angles that grow with the position."""
        # Counted by torch.arange, which headrace numbers where a worker has only some tokens of a sequence.
        places = torch.arange(x.shape[2], device=x.device)
        cos, sin = self.cos[places].to(x.dtype), self.sin[places].to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape, length), FeedForward(shape)
        self.first_norm, self.second_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class LanguageModel(nn.Module):
    """Takes bytes, `(batch, length)`, and returns logits of the next byte, `(batch, length, 256)`."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.Sequential(*(Block(shape, length) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def count(shape: Shape) -> int:
    """Returns how many parameters a model has; none is made."""
    with torch.device("meta"):
        return sum(each.numel() for each in LanguageModel(shape, 1).parameters())


def generate(model: nn.Module, prompt: str, most: int, length: int = 64) -> str:
    """Returns the prompt and up to `length` bytes, each the likeliest after the last `most` ones."""
    model.eval()
    text = list(prompt.encode()) or [0]
    with torch.inference_mode():
        for _ in range(length):
            text.append(int(model(torch.tensor([text[-most:]]))[0, -1].argmax()))
    return bytes(text).decode(errors="replace")

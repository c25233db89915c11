"""Tiny models of the transformers library, as they come, with a few examples for each.

Each trains three steps on a CPU in a second or two. Dropout is 0, so that any strategy can equal one device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr


def _load_torchvision() -> torch.library.Library | None:
    """Imports torchvision, if it is there; a wheel that is built for CUDA needs two operators that it has not loaded.

    The library that defines them must live as long as they do.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


LIBRARY = _load_torchvision()
EXAMPLES = 10
VOCABULARY, LENGTH, WIDTH, CLASSES = 48, 12, 16, 5


@dataclass(frozen=True)
class Entry:
    """A model and what it is trained on.

    Attributes:
        model: builds it, from torch's random numbers.
        batch: returns all examples, tensors by name.
        task: keyword arguments of `hr.tasks.own_loss`; None where the model returns no loss.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    task: dict[str, Any] | None


def _draw(*shape: int, high: int, seed: int) -> Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(seed))


def _mask() -> Tensor:
    mask = torch.ones(EXAMPLES, LENGTH, dtype=torch.long)
    for row in range(1, EXAMPLES, 3):
        mask[row, LENGTH - row // 2 - 2 :] = 0
    return mask


def text(padded: bool = True, labels: str = "tokens") -> dict[str, Tensor]:
    """Returns token indices and labels; `padded` with a mask, in which some rows end early."""
    ids = _draw(EXAMPLES, LENGTH, high=VOCABULARY, seed=1)
    batch = {"input_ids": ids}
    if padded:
        batch["attention_mask"] = _mask()
        batch["input_ids"] = ids.masked_fill(batch["attention_mask"] == 0, 0)
    if labels == "tokens":
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100) if padded else ids.clone()
    elif labels == "classes":
        batch["labels"] = _draw(EXAMPLES, high=CLASSES, seed=2)
    return batch


def image(size: int = 32) -> dict[str, Tensor]:
    """Returns images and classes."""
    pixels = torch.randn(EXAMPLES, 3, size, size, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "labels": _draw(EXAMPLES, high=CLASSES, seed=2)}


def sound() -> dict[str, Tensor]:
    """Returns spectrograms and tokens."""
    features = torch.randn(EXAMPLES, 8, 40, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "labels": _draw(EXAMPLES, LENGTH, high=VOCABULARY, seed=1)}


def pairs() -> dict[str, Tensor]:
    """Returns images and texts that belong together."""
    return {**text(labels=""), "pixel_values": image()["pixel_values"]}


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the similarity of each pair. CLIP's own loss is contrastive: on a part of a batch it is another loss."""
    weights = torch.arange(output.text_embeds.shape[1], dtype=output.text_embeds.dtype)
    similarity: Tensor = (output.text_embeds * output.image_embeds * weights).sum(-1).square().mean()
    return similarity


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The examples of a batch, by their index."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.batch.items()}


def _built(name: str) -> nn.Module:
    # By its name, so that a process imports this module, and torchvision as it does before the library.
    return TRANSFORMERS[name].model().double()


def job_of(name: str, learning_rate: float = 0.01) -> hr.Job:
    """Returns a job of three steps in double precision, the last with half a batch."""
    entry = TRANSFORMERS[name]
    batch = {key: value.double() if value.is_floating_point() else value for key, value in entry.batch().items()}
    data = Examples(batch)
    return hr.Job(
        model=partial(_built, name),
        optimizer=partial(torch.optim.SGD, lr=learning_rate),
        data=data,
        eval_data=data,
        global_batch_size=4,
        epochs=1,
        seed=1,
        task=None if entry.task is None else hr.tasks.own_loss(**entry.task),
        loss=loss_of if entry.task is None else None,
    )


def _of(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
    **_TOKENS,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    **_TOKENS,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 40,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **_TOKENS,
}
_DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": WIDTH,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "num_labels": CLASSES,
    **_TOKENS,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    **_TOKENS,
}
_WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    **_TOKENS,
}
_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": CLASSES,
}
_CLIP = {
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        **_TOKENS,
    },
    "vision_config": {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 8,
    },
    "projection_dim": 8,
}
_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "state_size": 4,
    "time_step_rank": 4,
    **_TOKENS,
}

_SHIFTED: dict[str, Any] = {"ignore_index": -100}
_PLAIN: dict[str, Any] = {"ignore_index": -100, "shifted": False}
_MEAN: dict[str, Any] = {}


def _transformers() -> dict[str, Entry]:
    qwen = partial(_of, "Qwen2ForCausalLM", "Qwen2Config", **_LLAMA)
    # The other kernels for experts take no double precision.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    mixtral = partial(_of, "MixtralForCausalLM", "MixtralConfig", **_LLAMA, **experts)
    causal = {
        "gpt2": partial(_of, "GPT2LMHeadModel", "GPT2Config", **_GPT2),
        "llama": partial(_of, "LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        "qwen2": qwen,
        "mixtral": mixtral,
        "mamba": partial(_of, "MambaForCausalLM", "MambaConfig", **_MAMBA),
    }
    found = {}
    for name, model in causal.items():
        found[name] = Entry(model, partial(text, False), _SHIFTED)
        found[f"{name}-padded"] = Entry(model, text, _SHIFTED)
        found[f"{name}-nocache"] = Entry(partial(model, use_cache=False), text, _SHIFTED)
    t5 = partial(_of, "T5ForConditionalGeneration", "T5Config", **_T5)
    bart = partial(_of, "BartForConditionalGeneration", "BartConfig", **_BART)
    whisper = partial(_of, "WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER)
    classes = partial(text, True, "classes")
    return found | {
        "bert": Entry(partial(_of, "BertForSequenceClassification", "BertConfig", **_BERT), classes, _MEAN),
        "bert-mlm": Entry(partial(_of, "BertForMaskedLM", "BertConfig", **_BERT), text, _PLAIN),
        "roberta": Entry(partial(_of, "RobertaForMaskedLM", "RobertaConfig", **_BERT), text, _PLAIN),
        "distilbert": Entry(
            partial(_of, "DistilBertForSequenceClassification", "DistilBertConfig", **_DISTILBERT), classes, _MEAN
        ),
        "t5": Entry(t5, text, _PLAIN),
        "t5-nocache": Entry(partial(t5, use_cache=False), text, _PLAIN),
        "bart": Entry(bart, text, _PLAIN),
        "bart-nocache": Entry(partial(bart, use_cache=False), text, _PLAIN),
        "whisper": Entry(whisper, sound, _PLAIN),
        "vit": Entry(partial(_of, "ViTForImageClassification", "ViTConfig", **_VIT), image, _MEAN),
        "clip": Entry(partial(_of, "CLIPModel", "CLIPConfig", **_CLIP), pairs, None),
    }


TRANSFORMERS = _transformers()

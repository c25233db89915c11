"""Small models of the transformers library as they come, in double precision, with batches that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.bench.library import declare_operators
from late import Late

declare_operators()

transformers = Late("transformers")

WORDS, TIME = 48, 7
Batch = dict[str, Tensor]

_SHAPE: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_LIKE_BERT: dict[str, Any] = {**_SHAPE, "intermediate_size": 32, "max_position_embeddings": 32}
_PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LIKE_LLAMA: dict[str, Any] = {**_LIKE_BERT, "num_key_value_heads": 2}
_TWO_STACKS: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_TOWER: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def words(count: int) -> Batch:
    """Sequences, one of them padded."""
    ids = torch.randint(4, WORDS - 1, (count, TIME))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def translated(count: int) -> Batch:
    return {**words(count), "labels": torch.randint(4, WORDS - 1, (count, 5))}


def heard(count: int) -> Batch:
    spectrum = torch.randn(count, 8, 20, dtype=torch.float64)
    return {"input_features": spectrum, "labels": torch.randint(4, WORDS - 1, (count, 5))}


def seen(count: int) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 8, 8, dtype=torch.float64)}


def captioned(count: int) -> Batch:
    return {**words(count), **seen(count)}


def _mixtral() -> nn.Module:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_LIKE_LLAMA, num_local_experts=4))
    # The kernels for several experts at once have no double precision.
    model.config._experts_implementation = "eager"
    return model


def _clip() -> nn.Module:
    text: dict[str, Any] = {**_TOWER, "vocab_size": WORDS, "max_position_embeddings": 32, "eos_token_id": 2}
    vision: dict[str, Any] = {**_TOWER, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_LIKE_BERT, **_PLAIN)), words),
    "roberta": (
        lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_LIKE_BERT, **_PLAIN, pad_token_id=1)),
        words,
    ),
    "distilbert": (
        lambda: transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(
                vocab_size=WORDS,
                dim=16,
                n_layers=2,
                n_heads=4,
                hidden_dim=32,
                dropout=0.0,
                attention_dropout=0.0,
                seq_classif_dropout=0.0,
            )
        ),
        words,
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=WORDS,
                n_embd=16,
                n_layer=2,
                n_head=4,
                n_positions=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        words,
    ),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LIKE_LLAMA)), words),
    "qwen2": (lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LIKE_LLAMA)), words),
    "qwen3": (lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LIKE_LLAMA, head_dim=4)), words),
    "mixtral": (_mixtral, words),
    "t5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)), translated),
    "t5, gated": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5, feed_forward_proj="gated-gelu")),
        translated,
    ),
    "bart": (
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(**_TWO_STACKS, max_position_embeddings=32, attention_dropout=0.0)
        ),
        translated,
    ),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**_TWO_STACKS, num_mel_bins=8, max_source_positions=10, max_target_positions=16)
        ),
        heard,
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**_TOWER, **_PLAIN, image_size=8, patch_size=4)
        ),
        seen,
    ),
    "mamba": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4)
        ),
        lambda count: {"input_ids": words(count)["input_ids"]},
    ),
    "clip": (_clip, captioned),
}


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """Returns a model in double precision."""
    model = MODELS[name][0]()
    if name != "mamba":
        model.set_attn_implementation(attention)
    made: nn.Module = model.double()
    return made

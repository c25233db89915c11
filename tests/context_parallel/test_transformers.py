"""Models of the transformers library, whose masks are those of whole sequences, are trained as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import UsageError
from strategies.contract_runs import distance, train

transformers = pytest.importorskip("transformers")
WORDS, SHAPE = 19, {"vocab_size": 19, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64}
LLAMA = {"intermediate_size": 12, "num_hidden_layers": 2, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA | {"use_cache": False}),
    "llama, with its cache": ("Llama", LLAMA),
    "sliding": ("Mistral", LLAMA | {"sliding_window": 5, "use_cache": False}),
    "layers of both kinds": (
        "Qwen2",
        LLAMA | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1, "use_cache": False},
    ),
    "gpt2": ("GPT2", {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}),
}


def job(model: str, tokens: int = 13, given: str = "", attention: str = "sdpa") -> hr.Job:
    """A language model; `given` says what it is given beside its tokens."""
    torch.manual_seed(1)
    name, config = MODELS[model]
    made = getattr(transformers, f"{name}Config")(**SHAPE, **config, attn_implementation=attention)
    text = torch.randint(0, WORDS, (6, tokens))
    places, length = torch.arange(tokens), torch.tensor([tokens, 4, tokens - 1, 1, 7, tokens])
    others = {
        "": None,
        "ones": torch.ones_like(text),
        "right": (places < length[:, None]).long(),
        "left": (places >= tokens - length[:, None]).long(),
        # Two texts in one sequence.
        "packed": torch.where(places < length[:, None] - 1, places, places - length[:, None] + 1),
    }
    other = others[given]
    mask = other if given in ("ones", "right", "left") else torch.ones_like(text)
    labels = text.masked_fill(mask == 0, -100)
    key = "position_ids" if given == "packed" else "attention_mask"
    data = [
        {"input_ids": row, "labels": labels[index]} | ({} if other is None else {key: other[index]})
        for index, row in enumerate(text)
    ]
    return hr.Job(
        model=getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(made).double(),
        task=hr.tasks.language_model(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        data=data,
        eval_data=data[:3],
        global_batch_size=3,
        epochs=1,
        seed=3,
        inputs=["input_ids", *([] if other is None else [key])],
        target="labels",
    )


CASES = [
    ("llama", "", 2),
    ("llama", "", 3),
    ("llama", "ones", 2),
    ("llama", "right", 3),
    ("llama", "left", 2),
    ("llama", "packed", 3),
    ("llama, with its cache", "", 2),
    ("sliding", "", 2),
    ("sliding", "packed", 3),
    ("layers of both kinds", "right", 2),
    ("gpt2", "", 3),
    ("gpt2", "right", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "given", "workers"), CASES)
def test_a_model_with_its_masks_is_one_device(model: str, given: str, workers: int) -> None:
    right, found = (
        train(job(model, 13, given), hr.OneDevice()),
        train(job(model, 13, given), hr.ContextParallel(workers)),
    )
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)
    library = transformers.masking_utils
    assert library.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is library.sdpa_mask
    assert library.find_packed_sequence_indices.__module__ == library.__name__


@pytest.mark.slow
def test_attention_in_python_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"attention that is not\s+torch.nn.functional.scaled_dot_product_attention"):
        train(job("llama", attention="eager"), hr.ContextParallel(2))

"""Files of the hub that have other tensors than the model of the transformers library has, such as experts apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import headrace as hr
from headrace.data.sources.storage import SourceFile
from headrace.errors import UsageError
from headrace.spec.weights import Weights
from headrace.weights.fitting import find_weights
from headrace.weights.saving import save_like
from strategies.contract_runs import distance, train
from weights.models import write

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    # More than ten, of which the names are not in the order of the numbers.
    "Qwen3Moe": {"num_experts": 12, "moe_intermediate_size": 20, "head_dim": 4},
}


def made(kind: str = "Mixtral", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **KINDS[kind])
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.set_experts_implementation("eager")
    return model.double()  # type: ignore[no-any-return]


def loaded(folder: Path, kind: str = "Mixtral") -> nn.Module:
    """Builds the model as a script does."""
    library: Any = getattr(transformers, f"{kind}ForCausalLM")
    model = library.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return model.train()  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A model of one's own around one of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.body = made()


def stored_in(folder: Path, kind: str = "Mixtral") -> dict[str, torch.Tensor]:
    """Saves a model as the library does, in several files, and returns the tensors."""
    made(kind, 7).save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    assert any(".experts.3." in name for name in stored_in(tmp_path, kind))
    model = made(kind)
    find_weights(Weights(tmp_path), model, "loss.").read(model)
    right = loaded(tmp_path, kind).state_dict()
    assert all(torch.equal(each, right[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        (hr.Hybrid(hr.FullySharded(2), hr.ExpertParallel(2)), 1.25),
        (hr.FullySharded(3, deferred=True), 1.02),
        pytest.param(hr.ExpertParallel(2), 1.02, marks=pytest.mark.full),
        pytest.param(hr.Mirrored(2), 1.02, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_runs_are_those_of_from_pretrained(
    strategy: hr.Strategy, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(each.nbytes for each in stored_in(tmp_path).values())
    read: list[int] = []
    whole = SourceFile.read_into

    def read_into(self: SourceFile, start: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        whole(self, start, buffer)

    monkeypatch.setattr(SourceFile, "read_into", read_into)
    text = torch.randint(0, 23, (8, 7), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": each, "labels": each} for each in text]

    def job(model: Any, weights: Path | None) -> hr.Job:
        return hr.Job(
            model=model,
            task=hr.tasks.own_loss(),
            optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
            data=examples,
            global_batch_size=4,
            epochs=1,
            weights=weights,
        )

    right = train(job(partial(loaded, tmp_path), None), hr.OneDevice())
    read.clear()
    found = train(job(made, tmp_path), strategy)
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert sum(read) <= share * size


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "DeepseekV3",
        "Ernie4_5_Moe",
        "Glm4Moe",
        "HunYuanMoEV1",
        "Jamba",
        "MiniMax",
        "Olmoe",
        "Phimoe",
        "Qwen2Moe",
        "Qwen3Next",
        "GptOss",
        "Llama4",
    ],
)
def test_other_mixtures(kind: str, tmp_path: Path) -> None:
    library: Any = getattr(transformers, f"{kind}ForCausalLM")
    experts = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 20}
    known = vars(library.config_class())
    wanted = {**SHAPE, **experts, "head_dim": 8}
    config = library.config_class(**{name: each for name, each in wanted.items() if name in known})
    library(config).save_pretrained(tmp_path, max_shard_size="20KB")
    model = library(config)
    find_weights(Weights(tmp_path), model, "loss.").read(model)
    right = library.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(each, right[name]) for name, each in model.state_dict().items())


def test_saved_files_are_as_they_were(tmp_path: Path) -> None:
    was = stored_in(tmp_path / "base")
    trained = made(seed=9)
    save_file(dict(trained.state_dict()), tmp_path / "model.safetensors")
    save_like(Weights(tmp_path / "base"), made(), tmp_path / "model.safetensors", tmp_path / "tuned")
    for file in (tmp_path / "base").glob("*.safetensors"):
        saved = load_file(tmp_path / "tuned" / file.name)
        assert {name: each.shape for name, each in saved.items()} == {name: was[name].shape for name in load_file(file)}
    again = loaded(tmp_path / "tuned").state_dict()
    assert all(torch.equal(each, again[name]) for name, each in trained.state_dict().items())


def test_a_model_in_another_one(tmp_path: Path) -> None:
    stored_in(tmp_path / "base")
    weights = Weights(tmp_path / "base", rename={"": "body."})
    model = Wrapped()
    find_weights(weights, model, "loss.").read(model)
    right = loaded(tmp_path / "base").state_dict()
    assert all(torch.equal(each, right[name]) for name, each in model.body.state_dict().items())
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    save_like(weights, Wrapped(), tmp_path / "model.safetensors", tmp_path / "tuned")
    names = {name for file in (tmp_path / "tuned").glob("*.safetensors") for name in load_file(file)}
    assert "body.model.layers.0.block_sparse_moe.experts.0.w1.weight" in names


def test_the_base_of_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    stored_in(tmp_path)
    model = peft.get_peft_model(made(), peft.LoraConfig(target_modules=["q_proj"]))
    find_weights(Weights(tmp_path), model, "loss.").read(model)
    right = loaded(tmp_path).state_dict()
    own = model.get_base_model().state_dict()
    known = {name.replace(".base_layer", ""): each for name, each in own.items() if "lora_" not in name}
    assert known.keys() == right.keys()
    assert all(torch.equal(each, right[name]) for name, each in known.items())


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (".experts.3.w1.weight", r"'model.layers.1.mlp.experts.gate_up_proj' of .*, and not by placing whole rows"),
        (
            ".experts.3.w2.weight",
            r"'model.layers.1.mlp.experts.down_proj' has shape \[3, 16, 24\] there and \[4, 16, 24\]",
        ),
        (".experts.", "2 tensors of the model are not there, 'model.layers.1.mlp.experts.gate_up_proj', "),
    ],
)
def test_an_expert_that_is_not_there(lost: str, said: str, tmp_path: Path) -> None:
    tensors = stored_in(tmp_path / "base")
    left = {name: each for name, each in tensors.items() if not ("layers.1." in name and lost in name)}
    with pytest.raises(UsageError, match=said):
        find_weights(Weights(write(tmp_path / "left", left)), made(), "loss.")


def test_values_that_move_between_rows_are_refused(tmp_path: Path) -> None:
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    class Turned(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        """Its files have the transpose of a matrix."""

    turn = WeightConverter("lm_head.weight", "lm_head.weight", [Transpose(0, 1)])
    register_checkpoint_conversion_mapping("Turned", [turn], overwrite=True)
    model = Turned(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"'lm_head.weight' of 'lm_head.weight', .*: it moves values between rows"):
        # So that names do not fit as they are.
        find_weights(Weights(tmp_path, unused=["model.norm.weight"]), model, "loss.")

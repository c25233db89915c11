"""Adapters of the peft library: models of which a part is in the base's files, and a part is trained and saved."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headrace.errors import UsageError
from headrace.weights.files import names_of

_BASE = "base_model.model."
_OWN = "lora_"
_WITHOUT_BASE = (True, False, "gaussian", "orthogonal")
"""First values of LoRA that do not depend on the base's."""


def names_of_base(
    module: nn.Module, names: Collection[str], stored: Collection[str]
) -> tuple[Mapping[str, list[str]], list[str]]:
    """Returns a model's names by those that its base has for them, and the names of what is an adapter's own.

    Only a model with LoRA of the peft library has a base, unless its whole state is stored; all others have their
    names.

    Raises:
        UsageError: adapters begin with values that are computed from the base's, which are not read yet.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel) or not isinstance(module.base_model, peft.LoraModel):
        return {name: [name] for name in names}, []
    if any(name.startswith(_BASE) for name in stored):
        return {name: [name] for name in names}, []
    for config in module.peft_config.values():
        if config.use_dora or config.init_lora_weights not in _WITHOUT_BASE:
            what = "use_dora=True" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
            raise UsageError(
                f"{what} computes adapters of the base's values, and weights= reads these later; load the base in the "
                "function that builds the model, without weights="
            )
    found: dict[str, list[str]] = {}
    own = []
    for name in names:
        parts = name.removeprefix(_BASE).split(".")
        if any(part.startswith(_OWN) for part in parts):
            own.append(name)
            continue
        if "modules_to_save" in parts:
            # A copy of a module, by the name of its adapter.
            at = parts.index("modules_to_save")
            del parts[at : at + 2]
        short = ".".join(part for part in parts if part not in ("base_layer", "original_module"))
        found.setdefault(short, []).append(name)
    return found, own


def save_adapters(model: Any, path: Path) -> None:
    """Writes the adapters of a model of peft's as that library does: the files that `PeftModel.from_pretrained` reads.

    Raises:
        UsageError: parameters are trained that are not in these files.
    """
    from peft import get_peft_model_state_dict

    saved = {
        each.data_ptr()
        for name in model.peft_config
        for each in get_peft_model_state_dict(model, adapter_name=name).values()
    }
    module: nn.Module = model
    if lost := [
        name for name, each in module.named_parameters() if each.requires_grad and each.data_ptr() not in saved
    ]:
        raise UsageError(
            f"{len(lost):,} trained parameters are none of the adapters', and would not be saved: {names_of(lost)}; "
            "name their modules in modules_to_save of the adapters' configuration, or save "
            "run.model.merge_and_unload()"
        )
    model.save_pretrained(path)

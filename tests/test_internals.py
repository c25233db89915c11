"""Each private name of another library: it is there, and what happens where it is not."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import checkpoint

from headrace import internals
from headrace.errors import UnfitMachine

SOURCE = Path(internals.__file__)


def tensors() -> list[Tensor]:
    return [torch.arange(6.0).view(2, 3) - 2, torch.tensor([-0.0, 1e30]), torch.zeros(0)]


OTHERS = [torch.full((2, 3), 0.3), torch.tensor([1e-30, 7.0]), torch.zeros(0)]

FOREACH: dict[str, tuple[Any, ...]] = {
    "add": (OTHERS,),
    "add_": (OTHERS,),
    "clamp_max": (0.5,),
    "clamp_min": (-0.5,),
    "copy_": (OTHERS,),
    "div_": (0.7,),
    "lerp_": (OTHERS, 0.3),
    "mul": (1.1,),
    "mul_": (OTHERS,),
    "sub": (OTHERS,),
    "sub_": (OTHERS,),
    "zero_": (),
}


def one_dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": [1]})


def lone_group() -> Any:
    distributed = importlib.import_module("torch.distributed")
    return distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1)


def group_options() -> Any:
    return importlib.import_module("torch._C._distributed_c10d").Backend.Options("gloo")


OWNERS: dict[str, Callable[[], Any]] = {
    "torch:Tensor": lambda: torch.zeros(2).to_sparse(),
    "torch:UntypedStorage": lambda: torch.zeros(0).untyped_storage(),
    "torch.nn": nn,
    "torch.nn:Module": lambda: nn.Linear(1, 1),
    "torch.nn:Conv2d": lambda: nn.Conv2d(1, 1, 1),
    "torch.nn:MultiheadAttention": lambda: nn.MultiheadAttention(2, 1),
    "torch.nn:init": lambda: nn.init,
    "torch.optim:Optimizer": lambda: torch.optim.SGD([torch.zeros(1)]),
    "torch._ops:OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch.autograd:forward_ad": lambda: forward_ad,
    "torch.utils:checkpoint": lambda: checkpoint,
    "torch.distributed.tensor:DTensor": lambda: importlib.import_module("torch.distributed.tensor").DTensor,
    "torch._C._distributed_c10d:Backend": lone_group,
    "torch._C._distributed_c10d:Backend.Options": group_options,
    "datasets:Dataset": one_dataset,
}
"""An object that has the attribute, by the class that the table names."""


@pytest.mark.parametrize("name", internals.NAMES)
def test_a_name_is_there(name: str) -> None:
    private = internals.NAMES[name]
    module, _, path = private.path.partition(":")
    if module.partition(".")[0] != "torch":
        pytest.importorskip(module.partition(".")[0])
    wanted: Any = importlib.import_module(module)
    for part in path.split("."):
        wanted = getattr(wanted, part)
    assert private.find() == wanted
    assert getattr(internals, name) == wanted
    assert private.purpose
    assert private.without.startswith("refused: ") != bool(private.substitute)


@pytest.mark.parametrize("attribute", internals.ATTRIBUTES, ids=lambda attribute: attribute.name)
def test_an_attribute_is_there(attribute: internals.PrivateAttribute) -> None:
    owner = OWNERS[attribute.of]()
    if isinstance(owner, type):
        # It is set by a constructor that wants a process group.
        assert attribute.name in owner.__annotations__
        return
    wanted = getattr(owner, attribute.name_in(owner))
    assert attribute(owner) is wanted or attribute(owner) == wanted


def test_a_newer_name_is_taken_where_there_is_one() -> None:
    attribute = internals.PrivateAttribute("_old", "torch:Tensor", "nothing", "hr.Nothing", newer="_new")
    assert attribute(SimpleNamespace(_old=1)) == 1
    assert attribute(SimpleNamespace(_old=1, _new=2)) == 2


@pytest.mark.parametrize("name", [name for name, private in internals.NAMES.items() if not private.substitute])
def test_a_feature_whose_name_is_missing_is_refused_when_it_is_used(name: str) -> None:
    here = internals.NAMES[name]
    private = internals.PrivateName(f"{here.path}_of_another_release", here.purpose, here.without)
    absent = private.find()
    feature = re.escape(here.without.removeprefix("refused: "))
    with pytest.raises(UnfitMachine, match=f"^{feature} needs {re.escape(private.path.replace(':', '.'))}, which "):
        absent("any", arguments=0)
    # A module that subclasses it is imported all the same.
    later = type("Later", (absent,), {})
    with pytest.raises(UnfitMachine, match=feature):
        later()


@pytest.mark.parametrize("attribute", internals.ATTRIBUTES, ids=lambda attribute: attribute.name)
def test_an_attribute_that_is_missing_is_refused_by_the_feature(attribute: internals.PrivateAttribute) -> None:
    with pytest.raises(
        UnfitMachine, match=f"^{re.escape(attribute.feature)} needs .*{attribute.name}, which .* lacks; "
    ):
        attribute(object())


def test_the_remedy_is_a_release_of_the_library_that_lacks_it() -> None:
    absent = internals.PrivateName("msgspec:_gone", "nothing", "refused: hr.Nothing").find()
    with pytest.raises(UnfitMachine, match=r"which msgspec (\S+) lacks; .*: pip install 'msgspec<\1'$"):
        absent()


def test_a_whole_module_that_is_missing_is_no_error_either() -> None:
    absent = internals.PrivateName("torch.nn.gone:Name", "nothing", "refused: hr.Nothing").find()
    with pytest.raises(UnfitMachine, match=r"hr\.Nothing needs torch\.nn\.gone\.Name, which torch 2\.\d+"):
        absent()


@pytest.mark.parametrize("method", FOREACH)
def test_tensor_by_tensor_gives_the_same_bits(method: str) -> None:
    private = internals.NAMES[f"foreach_{method}"]
    assert private.substitute is not None
    whole, single = tensors(), tensors()
    first = getattr(internals, f"foreach_{method}")(whole, *FOREACH[method])
    second = private.substitute()(single, *FOREACH[method])
    for one, other in zip([*whole, *(first or [])], [*single, *(second if first else [])], strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_a_scaled_sum_tensor_by_tensor() -> None:
    substitute = internals.NAMES["foreach_add_"].substitute
    assert substitute is not None
    whole, single = tensors(), tensors()
    internals.foreach_add_(whole, OTHERS, alpha=0.7)
    substitute()(single, OTHERS, alpha=0.7)
    assert all(torch.equal(one, other) for one, other in zip(whole, single, strict=True))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("BatchNorm", [nn.BatchNorm1d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)]),
        ("ConvNd", [nn.Conv1d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)]),
        ("DropoutNd", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()]),
    ],
)
def test_layers_of_torch_are_known_without_their_base(name: str, layers: list[nn.Module]) -> None:
    substitute = internals.NAMES[name].substitute
    assert substitute is not None
    for layer in (*layers, nn.Linear(1, 1), nn.LayerNorm(1)):
        assert isinstance(layer, substitute()) == isinstance(layer, getattr(internals, name)) == (layer in layers)


def test_without_the_tables_of_hooks_an_optimizer_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.training.optimizer import is_plain_sgd

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert is_plain_sgd(optimizer)
    substitute = internals.NAMES["global_pre_hooks"].substitute
    assert substitute is not None
    monkeypatch.setattr(internals, "global_pre_hooks", substitute(), raising=False)
    assert not is_plain_sgd(optimizer)


def test_hooks_of_modules_are_seen() -> None:
    layer = nn.Linear(1, 1)
    assert not internals.module_hooks(layer)
    layer.register_full_backward_pre_hook(lambda module, gradients: None)
    assert internals.module_hooks(layer)
    assert not internals.hooks_of_all_modules()
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert internals.hooks_of_all_modules()
    finally:
        handle.remove()


def test_a_name_that_the_table_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        getattr(internals, "unheard_of")  # noqa: B009


def test_types_are_checked_for_the_names_of_the_table() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {node.id for node in ast.walk(block) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert typed - {"Store"} == set(internals.NAMES)


WITHOUT = """
import dataclasses, importlib, pkgutil
import headrace
from headrace import internals

internals.NAMES = {
    name: dataclasses.replace(private, path=private.path + "_of_another_release")
    for name, private in internals.NAMES.items()
}
for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if module.name != "headrace.__main__" and not module.name.startswith(("headrace.engine.ray", "headrace.export")):
        importlib.import_module(module.name)
print(sorted(internals.NAMES.keys() & vars(internals).keys()))
"""


@pytest.mark.slow
def test_nothing_fails_at_import_without_any_of_the_names() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = set(ast.literal_eval(done.stdout))
    assert {"TorchDispatchMode", "HttpToolsProtocol", "BatchNorm", "foreach_add_"} <= asked


def test_a_dispatch_mode_imports_no_compiler() -> None:
    @internals.without_compiler
    class Mode(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not hasattr(Mode.__torch_dispatch__, "__wrapped__"), "torch's wrapper imports it at the first call"

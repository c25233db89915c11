"""What a profile belongs to: the same in every process, another for another model; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.prediction.profiling.origin import digest_of, origin_here, require_origin
from headrace.spec.model import ModelSpec

SAMPLE = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


def digest(model: nn.Module, optimizer: str = "SGD", sample: object = SAMPLE) -> str:
    return digest_of(model, optimizer, sample)


class One(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


def other(ending: str) -> nn.Module:
    kind = type("One", (nn.Linear,), {})
    source = f"def forward(self, inputs):\n    return self.linear(inputs) {ending}"
    names: dict[str, object] = {}
    exec(source, names)
    kind.forward = names["forward"]
    module: nn.Module = kind(4, 2)
    return module


def test_the_digest_is_of_form_and_code_and_not_of_values() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    again = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    assert digest(model) == digest(again)
    others = [
        digest(nn.Sequential(nn.Linear(4, 9), nn.ReLU())),
        digest(nn.Sequential(nn.Linear(4, 8), nn.GELU())),
        digest(model, "Adam"),
        digest(model, sample=(torch.zeros(2, 5), SAMPLE[1])),
        digest(model.double()),
        digest(nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.ReLU())),
    ]
    assert len({digest(again), *others}) == 7
    assert digest(other("* 3")) == digest(other("* 3"))
    assert len({digest(other(ending)) for ending in ("* 3", "* 4", "- 3")}) == 3


@pytest.mark.full
@pytest.mark.slow
def test_the_digest_is_the_same_in_another_process() -> None:
    program = (
        "import torch; from prediction.profiling.test_origin import One, digest; "
        "torch.manual_seed(7); print(digest(One(4, 2)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == digest(One(4, 2))


def test_a_profile_of_something_else_is_refused() -> None:
    here = {**origin_here("cpu"), "digest": "abc"}
    model = ModelSpec((), name="Net", origin=here)
    assert require_origin(model, here) == ()
    # What only one of them says is not compared, and a written file belongs to nothing.
    assert require_origin(model, {"precision": "bf16"}) == ()
    assert require_origin(ModelSpec(()), here) == ()
    for name in ("torch", "machine", "digest"):
        with pytest.raises(UsageError, match=f"the profile of Net .*{name if name != 'digest' else 'the model, its'}"):
            require_origin(model, {**here, name: "another"})
    with pytest.raises(UsageError, match=r"give --force to use it as it is"):
        require_origin(model, {**here, "torch": "1.0"})
    said = require_origin(model, {**here, "torch": "1.0", "machine": "another"}, force=True)
    assert said[0] == f"torch: {torch.__version__}, and here 1.0"
    assert len(said) == 2

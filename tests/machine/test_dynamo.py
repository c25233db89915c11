"""The compiler that a run does without until something compiles."""

from __future__ import annotations

import subprocess

import pytest

from warm.programs import PYTHON

_COLD = """
import sys
import torch
from headrace.machine.dynamo import has_compiler, postpone_compiler
from headrace.internals import COMPILER

assert not has_compiler()
postpone_compiler()
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)

def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    return x + 1

before = layer.weight.clone()
step(torch.ones(1, 2))
assert not torch.equal(layer.weight, before)
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
assert zero_grad.__dynamo_disable is zero_grad, "torch has another decorator"
assert not has_compiler() and "sympy" not in sys.modules

@torch.compiler.disable
def left_out(x):
    return x + torch.compiler.is_compiling()

assert has_compiler(), "a function of the user's must be left out of graphs"
assert torch._dynamo is sys.modules[COMPILER]
assert not hasattr(zero_grad, "__dynamo_disable")
compiled = torch.compile(lambda x: left_out(x) + torch.compiler.is_compiling(), backend="eager")
assert compiled(torch.zeros(1)).tolist() == [1.0]
step(torch.ones(1, 2))
assert zero_grad.__dynamo_disable is not zero_grad
"""


@pytest.mark.full
@pytest.mark.slow
def test_the_compiler_is_imported_when_something_compiles() -> None:
    subprocess.run([PYTHON, "-c", _COLD], check=True, timeout=300)


_SPARING = """
import sys
import torch, headrace as hr
from headrace.machine.dynamo import has_compiler

class Layer(torch.nn.Linear):
    def forward(self, x):
        assert not has_compiler() and "sympy" not in sys.modules
        return super().forward(x)

data = torch.randn(8, 4), torch.randn(8, 1)
job = hr.Job(lambda: torch.nn.Sequential(Layer(4, 4), Layer(4, 1)), loss=torch.nn.functional.mse_loss,
             optimizer=torch.optim.Adam, data=data, eval_data=data, global_batch_size=4, steps=2)
assert hr.fit(job, STRATEGY).status == "ok"
assert not has_compiler() and "sympy" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hr.Mirrored(workers=2)", "hr.Pipeline(stages=2)"])
def test_neither_launcher_nor_workers_import_what_they_do_not_need(strategy: str) -> None:
    subprocess.run([PYTHON, "-c", _SPARING.replace("STRATEGY", strategy)], check=True, timeout=300)


_ONCE = """
import os, sys
import torch, headrace as hr

launcher = os.getpid()

class Layer(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        in_worker = os.getpid() != launcher
        assert ("torch.distributed.fsdp" in sys.modules and "torch._dynamo.utils" in sys.modules) == in_worker

data = torch.randn(8, 4), torch.randn(8, 1)
job = hr.Job(lambda: Layer(4, 1), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.Adam, data=data,
             global_batch_size=4, steps=2)
assert hr.fit(job, hr.FullySharded(workers=2)).status == "ok"
"""


@pytest.mark.full
@pytest.mark.slow
def test_what_workers_need_is_imported_once_before_they_are_forked() -> None:
    subprocess.run([PYTHON, "-c", _ONCE], check=True, timeout=300)

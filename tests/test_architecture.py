"""The house holds: every rule over the whole package, and every rule against violations planted on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import house_devices
import house_internals
import house_paths
import house_plan
import house_rules as rules
import house_size
from house import PACKAGE, Modules, Rule, read

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / PACKAGE
RULES: tuple[Rule, ...] = (
    *rules.RULES,
    house_devices.device_names,
    house_internals.private_names,
    house_paths.path_questions,
    house_plan.plan_questions,
    house_plan.strategy_questions,
    house_size.size,
    house_size.closures,
)


@pytest.fixture(scope="module")
def package() -> Modules:
    return read({str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(package: Modules, rule: Rule) -> None:
    assert len(package) > 20
    assert rule(package) == [], rule.__doc__


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_files_beside_the_package_are_short_enough_too(folder: str) -> None:
    counts = {path: path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert {path: lines for path, lines in counts.items() if lines > rules.FILE_LINES} == {}


SOUND = {
    "__init__.py": "__all__ = ['Job']\ndef __getattr__(name): ...",
    "errors.py": "__all__ = ['Lost', 'Root']\nclass Root(Exception): ...\nclass Lost(Root): ...",
    "spec/__init__.py": "from headrace.spec.job import Job\n__all__ = ['Job']",
    "spec/job.py": (
        "from typing import TYPE_CHECKING\n__all__ = ['Job']\nif TYPE_CHECKING:\n    import torch\nclass Job: ..."
    ),
    "collectives/seam.py": (
        "import torch\nfrom abc import ABC, abstractmethod\n__all__ = ['LIMIT', 'Seam', 'cut']\nLIMIT: int = 3\n"
        "class Seam(ABC):\n    @abstractmethod\n    def cut(self): ...\n"
        "class Finer(Seam):\n    @abstractmethod\n    def fine(self): ...\n"
        "class Done(Finer):\n    def cut(self): ...\n    def fine(self): ...\n"
        "def cut(): ..."
    ),
    "spec/notes.py": (
        "from msgspec import Struct\nclass Note(Struct, tag_field='kind'): ...\nclass Said(Note, tag='said'): ..."
    ),
    "tasks.py": "from headrace import errors, metrics\n__all__ = []",
    "machine.py": "",
    "metrics.py": "from . import errors\n__all__ = []",
    "engine/ship.py": "import os, pickle, cloudpickle\n__all__ = []\nhome = os.environ['HOME']",
    "cli/main.py": "__all__ = []\ndef run():\n    import torch\n    from headrace.models.zoo import cnn",
    "models/zoo.py": "import torch\n__all__ = ['cnn']\ncnn = torch.nn.ReLU",
    "data/loader.py": "from headrace.policies import split\n__all__ = []",
    "policies/split.py": "__all__ = ['Share']\nclass Share: ...",
    "report/page.py": (
        "import os.path\n__all__ = []\n"
        "def page():\n    try:\n        open('x')\n    except Exception as error:\n        raise OSError from error\n"
        "    try:\n        open('x')\n    except OSError:\n        pass"
    ),
}
"""A small house in order; each violation is planted into it."""

TOO_LONG = "__all__ = []\n" + "x = 1\n" * 400
LONG_FUNCTION = "__all__ = []\ndef f():\n" + "    f()\n" * 60
MANY_METHODS = "__all__ = []\nclass C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(11))
MANY_ARGUMENTS = "__all__ = []\nclass C:\n    def __init__(self, a, b, c, d, *, e, f, g, h, i): ...\n"
MANY_FIELDS = (
    "from dataclasses import dataclass\n__all__ = []\n@dataclass\nclass A:\n"
    + "".join(f"    a{i}: int\n" for i in range(8))
    + "@dataclass(frozen=True)\nclass B(A):\n"
    + "".join(f"    b{i}: int\n" for i in range(10))
)

PLANTED: list[tuple[Rule, Mapping[str, str], str]] = [
    (
        rules.directions,
        {"spec/a.py": "from headrace.collectives.seam import Seam"},
        "may not import headrace.collectives.seam",
    ),
    (
        rules.directions,
        {"collectives/a.py": "from ..data import loader"},
        "may not import headrace.data.loader",
    ),
    (rules.directions, {"policies/a.py": "from headrace.collectives.seam import cut"}, "may not import headrace.coll"),
    (rules.directions, {"data/a.py": "def f():\n    import headrace.cli.main"}, "a:2: may not import headrace.cli"),
    (
        rules.directions,
        {"spec/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.collectives import seam"},
        "may not import headrace.collectives.seam",
    ),
    (
        rules.directions,
        {"spec/a.py": "import importlib\nimportlib.import_module('headrace.api.run')"},
        "headrace.api.run",
    ),
    (rules.directions, {"engine/a.py": "from headrace import Job"}, "may not import headrace"),
    (rules.directions, {"attic/a.py": ""}, "'attic' stands on no floor"),
    (rules.directions, {"engine/a.py": "from headrace.models.zoo import cnn"}, "for the command line alone"),
    (rules.directions, {"data/a.py": "from headrace.worker.main import Exchange"}, "may not import"),
    (
        rules.circles,
        {"spec/a.py": "def f():\n    from headrace.spec import b", "spec/b.py": "from headrace.spec.a import f"},
        "headrace.spec.a",
    ),
    (rules.circles, {"spec/a.py": "from headrace.spec import Job", "spec/job.py": "import headrace.spec.a"}, "circle"),
    (rules.names, {"collectives/net_utils.py": ""}, "'utils'"),
    (rules.names, {"data/common/a.py": ""}, "'common'"),
    (rules.exports, {"tasks.py": "x = 1"}, "no __all__"),
    (rules.exports, {"collectives/a.py": "__all__ = list('ab')"}, "no __all__"),
    (rules.exports, {"collectives/a.py": "__all__ = ['b', 'a']\na = b = 1"}, "not sorted"),
    (rules.exports, {"collectives/a.py": "__all__ = ['Ab', 'B']\nclass Ab: ...\nB = 1"}, "not sorted"),
    (rules.exports, {"collectives/a.py": "__all__ = ['gone']\ndef f():\n    gone = 1"}, "'gone', unbound"),
    (rules.folders, {f"collectives/m{i}.py": "" for i in range(12)}, "headrace.collectives: 13 modules"),
    (rules.meanings, {"collectives/a.py": "class Job: ..."}, "Job is a class in"),
    (rules.budgets, {"collectives/a.py": TOO_LONG}, "401 lines"),
    (rules.budgets, {"collectives/a.py": LONG_FUNCTION}, "f: 61 lines"),
    (rules.budgets, {"collectives/a.py": MANY_METHODS}, "C: 11 public methods"),
    (rules.budgets, {"collectives/a.py": MANY_ARGUMENTS}, "C: 9 arguments"),
    (rules.budgets, {"collectives/a.py": MANY_FIELDS}, "B: 18 fields"),
    (rules.environment, {"collectives/a.py": "import os\nprint(os.environ.get('A'))"}, "a:2"),
    (rules.environment, {"collectives/a.py": "import os as system\nprint(system.getenv('A'))"}, "a:2"),
    (rules.environment, {"collectives/a.py": "from os import environ"}, "a:1"),
    (rules.environment, {"api/fit.py": "import os.path\nprint(os.environ['A'])"}, "fit:2"),
    (rules.pickling, {"collectives/a.py": "import pickle"}, "pickle reads"),
    (rules.pickling, {"data/a.py": "def f():\n    from cloudpickle import dumps"}, "only engine/"),
    (rules.pickling, {"engine/a.py": "import pickle"}, "pickle reads"),
    (rules.pickling, {"engine/a.py": "import torch\ntorch.load('a')"}, "torch.load"),
    (
        rules.pickling,
        {"collectives/a.py": "from torch import distributed as d\nd.broadcast_object_list([1])"},
        "pickles",
    ),
    (
        rules.finals,
        {"collectives/a.py": "from headrace.collectives.seam import Done\nclass C(Done): ..."},
        "C subclasses Done",
    ),
    (
        rules.finals,
        {"collectives/a.py": "from headrace.collectives import seam\nclass C(seam.Done): ..."},
        "C subclasses Done",
    ),
    (
        rules.finals,
        {"collectives/a.py": "import headrace.collectives.seam\nclass C(headrace.collectives.seam.Done): ..."},
        "Done",
    ),
    (rules.finals, {"collectives/a.py": "from headrace.spec import Job\nclass C(Job[int]): ..."}, "C subclasses Job"),
    (rules.finals, {"collectives/a.py": "from headrace.errors import Root\nclass C(Root): ..."}, "C subclasses Root"),
    (rules.light, {"spec/a.py": "import torch.nn"}, "imports torch.nn"),
    (
        rules.light,
        {"cli/a.py": "from headrace.collectives.seam import Seam"},
        "headrace.cli.a -> headrace.collectives.seam",
    ),
    (rules.light, {"report/a.py": "class C:\n    import torch"}, "imports torch"),
    (
        rules.light,
        {"spec/__init__.py": "import torch\n__all__ = []"},
        "by headrace.spec.job -> headrace.spec",
    ),
    (rules.purity, {"policies/a.py": "def f():\n    import torch"}, "torch is not"),
    (rules.purity, {"policies/a.py": "from time import monotonic"}, "time is not"),
    (rules.purity, {"policies/a.py": "from headrace import machine"}, "headrace.machine is not"),
    (rules.numbered_fields, {"shared_memory/a.py": "fields = memoryview(bytearray(8)).cast('q')"}, "numbered"),
    (house_plan.plan_questions, {"worker/a.py": "def f(plan):\n    return plan.servers"}, "a:2: asks for plan.servers"),
    (house_plan.plan_questions, {"api/a.py": "print(order.plan.backups)"}, "asks for order.plan.backups"),
    (house_plan.plan_questions, {"engine/a.py": "print(self._plan.stages)"}, "asks for self._plan.stages"),
    (house_plan.plan_questions, {"engine/a.py": "print(plan.partition)"}, "asks for plan.partition"),
    (house_plan.plan_questions, {"worker/a.py": "if replica.portions: ..."}, "asks for replica.portions"),
    (house_plan.plan_questions, {"worker/a.py": "if replica.meetings: ..."}, "asks for replica.meetings"),
    (house_plan.plan_questions, {"worker/a.py": "print(plan.role(0).stage)"}, "asks for plan.role(0).stage"),
    (house_plan.plan_questions, {"engine/a.py": "print(role.kind)"}, "asks for role.kind"),
    (house_plan.plan_questions, {"worker/server.py": "print('a'.partition('b'))"}, "remove it from EXCEPTIONS"),
    (
        house_plan.strategy_questions,
        {"strategies/a.py": "class Even(Strategy): ...", "engine/a.py": "if isinstance(it, Odd | a.Even): ..."},
        "a:1: asks whether it is Even",
    ),
    (
        house_plan.strategy_questions,
        {"strategies/a.py": "class Even(ServedStrategy): ...", "api/a.py": "match it:\n    case Even(): ..."},
        "a:2: asks whether it is Even",
    ),
    (house_size.size, {f"a{i}.py": "x = 1\n" * 400 for i in range(400)}, "160,0"),
    (
        house_size.closures,
        {
            "strategies/one_device.py": "from headrace.training import step",
            "training/__init__.py": "import headrace.training.all",
            "training/step.py": "",
            "training/all.py": "x = 1\n" * 11_000,
        },
        "strategies.one_device loads 11,0",
    ),
    (
        house_devices.device_names,
        {"training/a.py": "if device.type == 'cuda':\n    pass"},
        "a:1: 'cuda' is for devices.py alone",
    ),
    (house_devices.device_names, {"strategies/a.py": "'May say cuda.'\nname = f'{index} of cuda:0'"}, "a:2: 'cuda'"),
    (house_devices.device_names, {"worker/a.py": "import torch\ntorch.xpu.synchronize()"}, "a:2: 'xpu' is for"),
    (house_devices.device_names, {"collectives/a.py": "BACKEND = 'gloo'"}, "a:1: 'gloo'"),
    (
        house_internals.private_names,
        {"training/a.py": "from torch.optim.lbfgs import _strong_wolfe"},
        "torch.optim",
    ),
    (
        house_internals.private_names,
        {"training/a.py": "import torch\ntorch._foreach_add_([], 1)"},
        "_foreach",
    ),
    (house_internals.private_names, {"pipeline/a.py": "def f(tensor):\n    return tensor._version"}, "tensor._version"),
    (house_internals.private_names, {"cli/a.py": "import importlib\nimportlib.import_module('torch._dynamo')"}, "a:2"),
    (house_paths.path_questions, {"api/a.py": "def f(path):\n    return path.is_dir()"}, "a:2: .is_dir() hides"),
    (rules.asking, {"collectives/a.py": "print(hasattr(1, 'x'))"}, "hasattr"),
    (rules.hiding, {"collectives/a.py": "try:\n    f()\nexcept:\n    raise"}, "a:3"),
    (rules.hiding, {"collectives/a.py": "try:\n    f()\nexcept (OSError, Exception):\n    pass"}, "a:3"),
    (rules.hiding, {"collectives/a.py": "import contextlib\nwith contextlib.suppress(Exception):\n    f()"}, "a:2"),
]


def test_a_house_in_order_gets_no_complaint() -> None:
    assert {rule.__name__: rule(read(SOUND)) for rule in RULES} == {rule.__name__: [] for rule in RULES}


@pytest.mark.parametrize(("rule", "files", "said"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, files: Mapping[str, str], said: str) -> None:
    found = rule(read({**SOUND, **files}))
    assert any(said in line for line in found), found


def test_every_rule_is_planted_against() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)

"""What a run computes before its start: seconds of the probes, and of tracing the model that a pipeline cuts.

The probes of `api/probes` are measured on small models, with a batch of 8 examples as they take it. `trace` is measured
on models of 12 blocks, on two sequences of 16 tokens, as the launcher calls it (with the check of its cuts) and as each
stage does (without); beside it the measurement of all layers that the partition needs, which includes a trace, and the
digest that a second run in the same process takes instead. Processor time, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import headrace as hr
from headrace.api.probes.probing import probe
from headrace.models import cnn, mlp
from headrace.pipeline.digest import digest
from headrace.pipeline.profile import profile
from headrace.pipeline.trace.tracing import trace
from headrace.training.whole_model import Objective

EXAMPLES = 64


def logits(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def digits() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def gpt2(**changes: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **changes))


def bert(**changes: int) -> nn.Module:
    return BertForSequenceClassification(BertConfig(num_labels=2, **changes))


def classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, *shape), torch.randint(0, 10, (EXAMPLES,))


def tokens(vocab: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, vocab, (EXAMPLES, 16))
    return drawn, drawn


def labelled(vocab: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocab, (EXAMPLES, 16)), torch.randint(0, 2, (EXAMPLES,))


Loss = Callable[..., Tensor]
TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PROBED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], Loss]] = {
    "digits mlp": (digits, classes(64), F.cross_entropy),
    "mlp, 5.8 M": (mlp, classes(784), F.cross_entropy),
    "cnn, 2.2 M": (cnn, classes(3, 32, 32), F.cross_entropy),
    "gpt2, 2 blocks of 32": (partial(gpt2, **TINY), tokens(100), logits),
    "bert, 2 blocks of 32": (partial(bert, vocab_size=100, **SMALL), labelled(100), logits),
}
TRACED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], Loss]] = {
    "gpt2, 12 blocks, 11 M": (partial(gpt2, n_embd=256, n_head=8, vocab_size=5000), tokens(5000), logits),
    "gpt2, 12 blocks, 124 M": (gpt2, tokens(50257), logits),
    "bert-base, 109 M": (bert, labelled(30000), logits),
}


def seconds(action: Callable[[], object], repetitions: int) -> list[float]:
    found = []
    for _ in range(repetitions):
        began = process_time()
        action()
        found.append(process_time() - began)
    return found


def probing(make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], loss: Loss) -> Callable[[], object]:
    module = make()
    job = hr.Job(
        model=module,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=hr.data.from_arrays(*data),
        global_batch_size=EXAMPLES,
        epochs=1,
    )

    def probed() -> None:
        if left_out := [each.line for each in probe(job, module, Objective(loss)) if each.where == "not probed"]:
            raise SystemExit(f"{type(module).__name__} was not probed: {left_out}")

    return probed


def traced(name: str, repetitions: int) -> dict[str, list[float]]:
    make, data, loss = TRACED[name]
    module = make()
    batch = (data[0][:2], data[1][:2])
    return {
        "launcher": seconds(lambda: trace(module, batch), repetitions),
        "stage": seconds(lambda: trace(module, batch, check=False), repetitions),
        "measured": seconds(lambda: profile(module, Objective(loss), batch, threads=1), 1),
        "digest": seconds(lambda: digest(module, Objective(loss), batch), repetitions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--traces", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    probes = {name: seconds(probing(*PROBED[name]), arguments.rounds) for name in PROBED}
    for name, found in probes.items():
        print(f"{name:24} first {found[0]:6.3f} s   median {statistics.median(found):6.3f} s", flush=True)
    traces = {}
    for name in TRACED:
        traces[name] = traced(name, arguments.traces)
        shown = "   ".join(f"{what} {statistics.median(found):6.2f} s" for what, found in traces[name].items())
        print(f"{name:24} {shown}", flush=True)
    results = Path(__file__).parent / "results" / "checks.json"
    results.write_text(json.dumps({**machine(), "probes_s": probes, "traces_s": traces}, indent=1) + "\n")


if __name__ == "__main__":
    main()

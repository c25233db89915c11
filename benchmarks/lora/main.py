"""The memory of LoRA on a Llama-shaped model under FullySharded, beside what its shard of the base and adapters need.

python benchmarks/lora/main.py [--workers 4] [--layers 16] [--steps 3]

Each process reports what it has of its own and shared memory in the last step, less what an equal process has before
the model is there (the same job with a model of one layer of width 8).
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.machine.allocator import give_back

VOCABULARY, LENGTH, RANK = 1024, 16, 8


class Rows(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def model(layers: int, width: int) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), use_cache=False,
    )  # fmt: skip
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=RANK, target_modules=names))


def memory() -> int:
    """Returns what this process has that is not of a file, its share of shared memory included."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0]: int(words[1]) * 1024 for words in lines}
    return found["Pss_Anon:"] + found["Pss_Shmem:"]


def steps(folder: Path) -> Callable[[hr.Worker], None]:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
        give_back()
        (folder / f"{worker.rank}.json").write_text(json.dumps(memory()))

    return train


def held(layers: int, width: int, workers: int, count: int) -> int:
    """Trains, and returns what the largest process has between steps."""
    job = hr.Job(
        model=functools.partial(model, layers, width),
        task=hr.tasks.own_loss(ignore_index=-100),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        data=Rows(),
        global_batch_size=workers,
        steps=count,
    )
    with tempfile.TemporaryDirectory() as folder:
        strategy = hr.FullySharded(workers, deferred=True)
        hr.launch(steps(Path(folder)), job, strategy, device="cpu", checkpoints=False, check=False)
        return max(json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers))


def needed(layers: int, width: int, workers: int) -> tuple[int, int]:
    """Returns the bytes of the base and of what is trained, whole: of the latter with gradients and AdamW's state."""
    with torch.device("meta"):
        parameters = list(model(layers, width).parameters())
    base = sum(each.nbytes for each in parameters if not each.requires_grad)
    return base, 4 * sum(each.nbytes for each in parameters if each.requires_grad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    base, adapters = needed(given.layers, given.width, given.workers)
    wanted = base // given.workers + adapters
    found = held(given.layers, given.width, given.workers, given.steps) - held(1, 64, given.workers, given.steps)
    print(json.dumps({
        "workers": given.workers, "base_bytes": base, "adapters_with_state_bytes": adapters,
        "wanted_bytes": wanted, "held_bytes": found, "of_wanted": round(found / wanted, 3),
    }))  # fmt: skip

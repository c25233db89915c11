"""What each strategy's processes read of stored weights, and hold at most, until the first step. See README.md.

python benchmarks/weights/starts.py [--only fully_sharded]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import headrace as hr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from routing import mixed

WIDTH, LAYERS, EXPERTS, TOKENS = 512, 8, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return made


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        return x + mixed(x, self.router, self.experts)


def model(layer: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(layer() for _ in range(LAYERS)))


STRATEGIES: dict[str, hr.Strategy] = {
    "one_device": hr.OneDevice(),
    "mirrored": hr.Mirrored(4),
    "central_storage": hr.CentralStorage(4),
    "parameter_averaging": hr.ParameterAveraging(4),
    "gossip": hr.Gossip(4),
    "parameter_server": hr.ParameterServer(4, servers=2),
    "downpour": hr.Downpour(4, servers=2),
    "fully_sharded": hr.FullySharded(4),
    "fully_sharded, deferred": hr.FullySharded(4, deferred=True),
    "pipeline": hr.Pipeline(4),
    "tensor_parallel": hr.TensorParallel(4),
    "expert_parallel": hr.ExpertParallel(4),
    "mirrored x expert_parallel": hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2)),
    "mirrored x fully_sharded": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "mirrored x pipeline": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
    "mirrored x tensor_parallel": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "fully_sharded x tensor_parallel": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "fully_sharded x pipeline": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)),
    "pipeline x tensor_parallel": hr.Hybrid(hr.Pipeline(2), hr.TensorParallel(2)),
    "parameter_server x pipeline": hr.Hybrid(hr.ParameterServer(2, servers=2), hr.Pipeline(2)),
}


def counted() -> tuple[int, int]:
    """Returns the bytes that this process has read so far, and the most that it has held."""
    lines = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    held = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["rchar"]), int(held["VmHWM"].split()[0]) << 10


def steps(folder: Path, worker: hr.Worker) -> None:
    (folder / f"{worker.rank}.json").write_text(json.dumps(counted()))
    for batch in worker.batches():
        worker.step(batch)


def start(strategy: hr.Strategy, layer: type[nn.Module], weights: Path | None) -> tuple[int, int]:
    """Returns what all workers read until the first step, and the most that one held."""
    x = torch.randn(16, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    job = hr.Job(
        model=functools.partial(model, layer),
        loss=functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        data=(x, x.flip(1)),
        global_batch_size=16,
        steps=1,
        weights=weights,
    )
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        told.mkdir()
        given = {"run_dir": f"{folder}/run", "checkpoints": False, "device": "cpu", "check": False}
        hr.launch(functools.partial(steps, told), job, strategy, **given)  # type: ignore[arg-type]
        found = [json.loads(each.read_text()) for each in told.iterdir()]
    return sum(read for read, _ in found), max(held for _, held in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STRATEGIES)
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        sizes = {}
        for layer in (Block, Mixture):
            (place := Path(folder, layer.__name__)).mkdir()
            save_file(model(layer).state_dict(), place / "model.safetensors")
            sizes[layer] = (place / "model.safetensors").stat().st_size
        for name in (only,) if only else STRATEGIES:
            layer = Mixture if "expert" in name else Block
            without, _ = start(STRATEGIES[name], layer, None)
            read, held = start(STRATEGIES[name], layer, Path(folder, layer.__name__))
            print(json.dumps({
                "strategy": name, "file_bytes": sizes[layer], "bytes_read": read - without,
                "of_file": round((read - without) / sizes[layer], 2), "most_held_mb": round(held / 1e6),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

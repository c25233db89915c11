"""TorchRec's EmbeddingBagCollection on gloo, with two processes; prints ms of a step.

    torchrec_rows.py FOLDER row_wise|table_wise

`row_wise` divides the table by rows among both. TorchRec's planner does so on GPUs alone, so the plan is made by hand;
its sharded module then works on gloo. `table_wise` has the whole table on one of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROWS, WIDTH, BATCH, WORKERS = 1_000_000, 64, 2_000, 2
STEPS, WARM = 60, 10


def work(rank: int, folder: str, sharding: str) -> None:
    sys.path.insert(0, folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29591", RANK=str(rank), WORLD_SIZE=str(WORKERS))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORKERS))
    torch.set_num_threads(1)
    import fbgemm_gpu  # noqa: F401
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    dist.init_process_group("gloo")
    device = torch.device("cpu")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(name="item", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=["id"])
            self.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
            self.tower = nn.Linear(WIDTH, 1)

        def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
            return self.tower(self.tables(ids).values()).squeeze(1)

    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    placed = construct_module_sharding_plan(
        model.tables,
        {"item": {"row_wise": row_wise, "table_wise": lambda: table_wise(rank=0)}[sharding]()},
        sharder=sharder,
        world_size=WORKERS,
        local_size=WORKERS,
        device_type="cpu",
    )
    plan = ShardingPlan(plan={"tables": placed})
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    tower = torch.optim.SGD([p for n, p in model.named_parameters() if "tower" in n], lr=0.1)
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[: 10 * WORKERS * BATCH]
    targets = torch.randn(BATCH)
    ones = torch.ones(BATCH, dtype=torch.int32)
    took = []
    for step in range(STEPS):
        start = (step % 10 * WORKERS + rank) * BATCH
        began = time.perf_counter()
        batch = KeyedJaggedTensor(keys=["id"], values=ids[start : start + BATCH], lengths=ones)
        tower.zero_grad()
        nn.functional.mse_loss(model(batch), targets).backward()
        tower.step()
        if step >= WARM:
            took.append(time.perf_counter() - began)
    if rank == 0:
        print(1e3 * statistics.median(took))
    dist.barrier()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    mp.spawn(work, (sys.argv[1], sys.argv[2]), nprocs=WORKERS)

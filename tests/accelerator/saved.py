"""A script for Accelerate that saves its state, and goes on from it: `saved.py FOLDER KILLED RESUMED`."""

from __future__ import annotations

import math
import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
folder, killed, resumed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Best:
    """What the script keeps of its own."""

    loss = math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
torch.manual_seed(4)
inputs = torch.randn(38, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
best = Best()
accelerator.register_for_checkpointing(best)
steps_of_epoch = math.ceil(len(loader) / 2)
if resumed:
    accelerator.load_state(os.path.join(folder, f"step_{resumed}"))
done = resumed
for epoch in range(resumed // steps_of_epoch, 3):
    skips = resumed % steps_of_epoch * 2 if epoch == resumed // steps_of_epoch else 0
    for batch, target in accelerator.skip_first_batches(loader, skips) if skips else loader:
        with accelerator.accumulate(model):
            loss = (model(batch).squeeze(1) - target).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        best.loss = min(best.loss, accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            done += 1
            accelerator.save_state(os.path.join(folder, f"step_{done}"))
            if done == killed:
                os.kill(os.getpid(), signal.SIGKILL)
numbers = {name: each.flatten().tolist() for name, each in model.state_dict().items()}
numbers |= {"best": [best.loss], "rate": schedule.get_last_lr(), "drawn": torch.rand(2).tolist()}

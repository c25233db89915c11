"""Denoising: time steps and noise are drawn in the loop; an averaged copy of the model makes samples at the end."""

import torch
from local_data import images
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace

T = 10


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Embedding(T, 16), nn.Sequential(nn.Linear(80, 32), nn.SiLU(), nn.Linear(32, 64))

    def forward(self, x, t):
        return self.body(torch.cat([x, self.time(t)], 1))


torch.manual_seed(0)
here = hr.processes()  # headrace
alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.2, T), 0)
loader = DataLoader(TensorDataset(*images(43)), batch_size=10, shuffle=True)
model = Denoiser()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = hr.setup(model, optimizer, loader)  # headrace
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
history = []
for epoch in range(2):
    for x, _ in loader:
        x = 2 * x.flatten(1) - 1
        with here.common():  # headrace, was: if True:
            count = int(here.sum(len(x)))  # headrace, was: count = len(x)
            t, noise = torch.randint(T, (count,)), torch.randn(count, 64)
        t, noise = here.share((t, noise))  # headrace
        a = alpha_bar[t, None]
        loss = functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        ema.update_parameters(model)
        history.append(here.mean(loss, len(x)))  # headrace, was: history.append(loss.item())
with torch.no_grad():
    history.append(ema(torch.ones(2, 64), torch.tensor([1, 2])).sum().item())

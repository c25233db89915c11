"""An online network follows a target, which is an average of it, moved after each step."""

import copy

import torch
from local_data import images
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace

torch.manual_seed(0)
loader = DataLoader(TensorDataset(*images(42)), batch_size=8, shuffle=True)
online = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
target = copy.deepcopy(online).requires_grad_(False)
learner = nn.ModuleList([online, predictor])
optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
learner, optimizer, loader = hr.setup(learner, optimizer, loader)  # headrace
history = []


def regression(x, y):
    return 2 - 2 * functional.cosine_similarity(x, y, dim=-1)


for epoch in range(2):
    for pictures, _ in loader:
        one, two = pictures, pictures.flip(3)
        with torch.no_grad():
            to_one, to_two = target(one), target(two)
        loss = (regression(predictor(online(one)), to_two) + regression(predictor(online(two)), to_one)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
    history.append(sum(each.sum().item() for each in target.parameters()))

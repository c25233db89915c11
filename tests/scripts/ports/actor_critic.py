"""An actor and a critic with a shared body, on episodes that a loader of seeds numbers; smooth L1 for values."""

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional
from torch.utils.data import DataLoader

import headrace as hr  # headrace


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(2, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x):
        x = functional.relu(self.affine(x))
        return functional.softmax(self.action(x), dim=-1), self.value(x)


def episode(model, seed):
    drawn = torch.Generator().manual_seed(int(seed))
    place, saved, rewards = 0.0, [], []
    for step in range(12):
        probs, value = model(torch.tensor([place, step / 12]))
        u = torch.rand((), generator=drawn)
        action = (u > probs[0].detach()).long()
        saved.append((Categorical(probs).log_prob(action), value))
        place += 0.25 if action else -0.25
        rewards.append(place)
        if abs(place) >= 1:
            break
    return saved, rewards


def finish(saved, rewards):
    R, returns = 0.0, []
    for r in rewards[::-1]:
        R = r + 0.9 * R
        returns.insert(0, R)
    losses = []
    for (log_prob, value), R in zip(saved, returns, strict=True):
        losses.append(-log_prob * (R - value.item()))
        losses.append(functional.smooth_l1_loss(value, torch.tensor([R])))
    return torch.stack([each.reshape(()) for each in losses]).sum()


torch.manual_seed(543)
model = Policy()
optimizer = optim.Adam(model.parameters(), lr=3e-2)
seeds = DataLoader(range(25), batch_size=5)
model, optimizer, seeds = hr.setup(model, optimizer, seeds, reduction="mean")  # headrace
history = []
for batch in seeds:
    optimizer.zero_grad()
    losses = [finish(*episode(model, seed)) for seed in batch]
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        history.append(model(torch.ones(1, 2))[1].item())

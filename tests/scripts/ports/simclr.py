"""Two noisy forms of each picture, and a loss over all pairs of the batch: every example is compared with all others."""

import torch
from local_data import images
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace


def nt_xent(features, temperature=0.5):
    features = functional.normalize(features, dim=1)
    similarity = features @ features.t() / temperature
    similarity.fill_diagonal_(-1e9)
    half = len(features) // 2
    return functional.cross_entropy(similarity, torch.arange(2 * half).roll(half))


torch.manual_seed(0)
loader = DataLoader(TensorDataset(*images(48)), batch_size=12, shuffle=True, drop_last=True)
encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
encoder, optimizer, loader = hr.setup(encoder, optimizer, loader)  # headrace
history = []
for epoch in range(2):
    for pictures, _ in loader:
        views = torch.cat([pictures, pictures.flip(3)])
        loss = nt_xent(encoder(views))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())

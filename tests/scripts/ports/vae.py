"""A variational autoencoder: a loss that is a sum, printed per example of the whole set; noise inside forward."""

import torch
from local_data import images
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace

NOISE = 0.0  # What each process draws in forward is its own: with noise, another result than alone.


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.fc3, self.fc4 = nn.Linear(4, 20), nn.Linear(20, 64)

    def encode(self, x):
        h = functional.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + NOISE * torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = functional.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
order = torch.Generator().manual_seed(2)
train_loader = DataLoader(TensorDataset(*images(70)), batch_size=16, shuffle=True, generator=order)
test_loader = DataLoader(TensorDataset(*images(30, seed=1)), batch_size=16)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader = hr.setup(model, optimizer, train_loader, reduction="sum")  # headrace
history = []
for epoch in range(1, 4):
    model.train()
    train_loss = 0
    for data, _ in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    train_loss = hr.processes().sum(train_loss)  # headrace
    print(f"epoch {epoch} average loss {train_loss / len(train_loader.dataset):.4f}")
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    history += [train_loss, test_loss / len(test_loader.dataset)]
    sample = model.decode(torch.ones(2, 4))

"""Rows of a picture as a sequence for an LSTM with BatchNorm behind it; the rate per epoch."""

import torch
from local_data import images
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 10, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x):
        output, hidden = self.rnn(x.reshape(-1, 8, 8))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(output[:, -1]))), dim=1)


def collate(rows):
    return torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])


torch.manual_seed(1)
loader = DataLoader(TensorDataset(*images(60)), batch_size=13, shuffle=True, collate_fn=collate, drop_last=True)
model = Net()
optimizer = optim.Adadelta(model.parameters(), lr=0.5)
model, optimizer, loader = hr.setup(model, optimizer, loader)  # headrace
scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
history, best = [], None
for epoch in range(3):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    scheduler.step()
    history.append(optimizer.param_groups[0]["lr"])

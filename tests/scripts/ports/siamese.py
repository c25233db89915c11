"""Two pictures through one network, and whether they are of one class; pairs by the data set."""

import torch
from local_data import images
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import headrace as hr  # headrace


class Matcher(Dataset):
    def __init__(self, count, seed):
        self.data, self.targets = images(count, seed=seed)
        self.grouped = {c: (self.targets == c).nonzero().flatten() for c in range(4)}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        label = int(self.targets[index])
        other = label if index % 2 == 0 else (label + 1) % 4
        group = self.grouped[other]
        return self.data[index], self.data[group[index % len(group)]], torch.tensor(float(index % 2 == 0))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        self.body.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Conv2d):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, one, two):
        return self.fc(torch.cat([self.body(one), self.body(two)], 1))


torch.manual_seed(1)
train_loader = DataLoader(Matcher(50, 0), batch_size=9, shuffle=True, num_workers=1)
test_loader = DataLoader(Matcher(20, 1), batch_size=20)
model, criterion = SiameseNetwork(), nn.BCELoss()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
model, optimizer, train_loader = hr.setup(model, optimizer, train_loader)  # headrace
scheduler = StepLR(optimizer, 1, 0.7)
history = []
for epoch in range(2):
    model.train()
    for one, two, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(one, two).squeeze(), target)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for one, two, target in test_loader:
            outputs = model(one, two).squeeze()
            history += [criterion(outputs, target).item(), (outputs.round() == target).sum().item()]
    scheduler.step()

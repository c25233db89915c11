"""Pictures made larger by PixelShuffle; one loader for training, one for tests; average PSNR; whole models saved."""

from math import log10

import torch
from local_data import images
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import headrace as hr  # headrace


class Pictures(Dataset):
    def __init__(self, count, seed):
        self.large = images(count, seed=seed)[0]

    def __len__(self):
        return len(self.large)

    def __getitem__(self, index):
        return functional.avg_pool2d(self.large[index], 2), self.large[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        nn.init.orthogonal_(self.conv1.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        return self.shuffle(self.conv2(functional.relu(self.conv1(x))))


torch.manual_seed(123)
training_data_loader = DataLoader(dataset=Pictures(30, 0), num_workers=2, batch_size=4, shuffle=True)
testing_data_loader = DataLoader(dataset=Pictures(10, 1), batch_size=4, shuffle=False)
model, criterion = Net(), nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)
model, optimizer, training_data_loader = hr.setup(model, optimizer, training_data_loader)  # headrace
history = []
for epoch in range(1, 3):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += hr.processes().mean(loss, len(input))  # headrace, was: epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    history.append(epoch_loss / len(training_data_loader))
    with torch.no_grad():
        psnr = [10 * log10(1 / criterion(model(x), y).item()) for x, y in testing_data_loader]
    history.append(sum(psnr) / len(testing_data_loader))
    hr.processes().on_first(torch.save, model, f"model_epoch_{epoch}.pth")  # headrace, was: torch.save(model, f"model_epoch_{epoch}.pth")

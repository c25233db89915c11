"""A convolutional network on small pictures, as pytorch/examples' mnist: rates by StepLR, a test after each epoch."""

import argparse

import torch
from local_data import images
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # headrace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc = nn.Linear(24, 4)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return functional.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done, of = batch_idx * args.batch_size, len(train_loader.dataset)
            value = hr.processes().mean(loss, len(data))  # headrace, was: value = loss.item()
            print(f"epoch {epoch} [{done}/{of} ({100.0 * batch_idx / len(train_loader):.0f}%)] loss {value:.6f}")
            history.append(value)


def test(model, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += functional.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(1).eq(target).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"test loss {test_loss:.4f}, accuracy {correct}/{len(test_loader.dataset)}")
    history.extend([test_loss, correct])


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--gamma", type=float, default=0.7)
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args()
history = []

torch.manual_seed(1)
train_loader = DataLoader(TensorDataset(*images(90)), args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(*images(50, seed=1)), 20, shuffle=True)
model = Net()
optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
model, optimizer, train_loader = hr.setup(model, optimizer, train_loader)  # headrace
scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
for epoch in range(1, args.epochs + 1):
    train(args, model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
hr.processes().on_first(torch.save, model.state_dict(), "cnn.pt")  # headrace, was: torch.save(model.state_dict(), "cnn.pt")
model.load_state_dict(torch.load("cnn.pt", weights_only=True))

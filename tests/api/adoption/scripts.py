"""Training scripts in a few lines, as tests adopt them, and a dry run of one in a process of its own."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from headrace.api.adoption import dry_run
from headrace.api.adoption.facts import FACTS, Facts, read_facts

TOP = """
import argparse
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs, labels = torch.randn(22, 6), torch.randint(0, 3, (22,))
"""
PLAIN = (
    TOP
    + """
model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
total = 0.0
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
"""
)
FUNCTIONS = (
    TOP
    + """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def train(args, net, device, batches, opt, epoch):
    net.train()
    for number, (x, y) in enumerate(batches):
        x, y = x.to(device), y.to(device)
        opt.zero_grad()
        out = net(x)
        loss = functional.cross_entropy(out, y, label_smoothing=args.smooth)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        opt.step()
        if number % args.log == 0:
            print(f"{epoch} {number} {loss.item()}")
            if args.short:
                break


def test(net, device, batches):
    net.eval()
    right = 0
    with torch.no_grad():
        for x, y in batches:
            right += (net(x.to(device)).argmax(1) == y).sum().item()
    print(right)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("clip", 0.5), ("smooth", 0.1), ("rate", 0.2)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--log", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu")
    net = Net(4).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.rate)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    held_in = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
    held_out = DataLoader(TensorDataset(inputs[:9].clone(), labels[:9].clone()), batch_size=4)
    for epoch in range(1, args.epochs + 1):
        train(args, net, device, held_in, opt, epoch)
        test(net, device, held_out)
        schedule.step()
    torch.save(net.state_dict(), "net.pt")


if __name__ == "__main__":
    main()
"""
)
METHODS = (
    TOP
    + """
class Trainer:
    def __init__(self, rate):
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.loader = DataLoader(TensorDataset(inputs, labels), batch_size=8, shuffle=True)
        self.losses = []

    def once(self, epoch):
        for x, y in self.loader:
            loss = self.criterion(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.once(epoch)


trainer = Trainer(0.01)
trainer.fit(2)
"""
)
NOISE = (
    TOP
    + """
SCALE = 0.1


def groups(model):
    plain = [each for each in model.parameters() if each.ndim < 2]
    return [{"params": [each for each in model.parameters() if each.ndim > 1]}, {"params": plain, "weight_decay": 0.0}]


model = nn.ModuleDict({"into": nn.Linear(6, 4), "back": nn.Linear(4, 6)})
model["back"].weight.register_hook(lambda gradient: 0.5 * gradient)
optimizer = torch.optim.AdamW(groups(model), lr=0.01, weight_decay=0.1)
rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
rows = [{"x": row, "name": f"row {place}"} for place, row in enumerate(inputs)]
loader = DataLoader(rows, batch_size=8, shuffle=True)
for epoch in range(3):
    for batch in loader:
        x = batch["x"]
        code = model["into"](x)
        code = code + SCALE * torch.randn_like(code)
        loss = functional.mse_loss(model["back"](code), x) + 1e-3 * model["into"].weight.abs().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
"""
)


def dry(folder: Path, source: str, steps: int = 5, arguments: tuple[str, ...] = ()) -> Facts:
    """Writes a script into a folder and runs it there, in a process that has torch already; returns what was seen."""
    script = folder / "train.py"
    script.write_text(source)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            torch.set_num_threads(1)
            sys.argv = ["dry_run", str(folder), str(steps), str(script), *arguments]
            dry_run.main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(child, 0)
    assert (folder / FACTS).exists(), (folder / "output.txt").read_text()
    return read_facts(folder)

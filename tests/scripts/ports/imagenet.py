"""Classes of pictures: BatchNorm in evaluation, meters, the best saved, resumed, and evaluated alone."""

import os
import shutil

import torch
from local_data import images
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import headrace as hr  # headrace


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count

    def all_reduce(self):
        self.sum, self.count = hr.processes().sum(self.sum), hr.processes().sum(self.count)  # headrace, was: pass


def accuracy(output, target, topk=(1, 2)):
    with torch.no_grad():
        correct = output.topk(max(topk), 1).indices.eq(target.view(-1, 1))
        return [100.0 * correct[:, :k].sum().item() / len(target) for k in topk]


def train(loader):
    losses, top1, top2 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    for pictures, target in loader:
        output = model(pictures)
        loss = criterion(output, target)
        for meter, value in zip((losses, top1, top2), (loss.item(), *accuracy(output, target)), strict=True):
            meter.update(value, len(pictures))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for meter in (losses, top1, top2):
        meter.all_reduce()
    history.extend(meter.avg for meter in (losses, top1, top2))


def validate(loader):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for pictures, target in loader:
            output = model(pictures)
            losses.update(criterion(output, target).item(), len(pictures))
            top1.update(accuracy(output, target)[0], len(pictures))
    losses.all_reduce(), top1.all_reduce()
    history.extend([losses.avg, top1.avg])
    return top1.avg


def build(name, resume, start_epoch=0, best=0.0):
    global model, criterion, optimizer
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 4))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    if resume and os.path.isfile(resume):
        checkpoint = torch.load(resume)
        start_epoch, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train_loader = DataLoader(Subset(TensorDataset(*images(80)), range(4, 70)), 16, shuffle=True, drop_last=False)
    val_loader = DataLoader(TensorDataset(*images(31, seed=1)), 7)
    model, optimizer, train_loader = hr.setup(model, optimizer, train_loader)  # headrace
    model, optimizer, val_loader = hr.setup(model, optimizer, val_loader)  # headrace
    return scheduler, train_loader, val_loader, start_epoch, best


def main(epochs, resume="", evaluate=False):
    scheduler, train_loader, val_loader, start_epoch, best = build("cnn", resume)
    if evaluate:
        return validate(val_loader)
    for epoch in range(start_epoch, epochs):
        train(train_loader)
        acc1 = validate(val_loader)
        scheduler.step()
        is_best, best = acc1 > best, max(acc1, best)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best": best}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        hr.processes().on_first(torch.save, state, "checkpoint.pth.tar")  # headrace, was: torch.save(state, "checkpoint.pth.tar")
        if is_best and hr.processes().is_first:  # headrace, was: if is_best:
            shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    return best


history = []
main(2)
main(4, resume="checkpoint.pth.tar")
hr.processes().barrier()  # headrace
main(0, resume="model_best.pth.tar", evaluate=True)

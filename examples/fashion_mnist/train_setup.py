"""train_torch.py on several workers: the loop stays, and two lines of code are new (marked).

headrace launch examples/fashion_mnist/train_setup.py --workers 2
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr  # new
from headrace.data import fashion_mnist_or_digits
from headrace.models import fashion_cnn

LR, EPOCHS, BATCH = 0.003, 3, 256


def main() -> None:
    torch.manual_seed(0)
    images = fashion_mnist_or_digits()
    loader = DataLoader(TensorDataset(*images.train), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(TensorDataset(*images.test), batch_size=1000)
    model = fashion_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    model, optimizer, loader = hr.setup(model, optimizer, loader, strategy="mirrored")  # new

    for epoch in range(EPOCHS):
        model.train()
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: accuracy {accuracy(model, test_loader):.4f}")


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    model.eval()
    right = total = 0
    for inputs, target in loader:
        right += int((model(inputs).argmax(1) == target).sum())
        total += len(target)
    return right / total


if __name__ == "__main__":
    main()

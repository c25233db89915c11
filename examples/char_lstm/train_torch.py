"""The training of job.py by hand, in plain PyTorch, on one device.

python examples/char_lstm/train_torch.py
"""

from __future__ import annotations

import math

import torch
from stdlib_text import VOCAB, texts
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from headrace.models import char_lstm

LR, EPOCHS, BATCH, HIDDEN = 0.005, 2, 128, 192


def main() -> None:
    torch.manual_seed(0)
    train, test = texts()
    loader = DataLoader(TensorDataset(*train), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(TensorDataset(*test), batch_size=256)
    model = char_lstm(VOCAB, embedding=32, hidden=HIDDEN)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    for epoch in range(EPOCHS):
        model.train()
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs).flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step()
        accuracy, mean_loss = evaluate(model, test_loader)
        print(
            f"epoch {epoch + 1}: accuracy {accuracy:.4f}, loss {mean_loss:.4f}, "
            f"bits per character {mean_loss / math.log(2):.4f}"
        )


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    model.eval()
    right = total = 0
    summed = 0.0
    for inputs, target in loader:
        output = model(inputs)
        right += int((output.argmax(-1) == target).sum())
        summed += cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
        total += target.numel()
    return right / total, summed / total


if __name__ == "__main__":
    main()

"""Sine waves continued by two LSTM cells, trained by LBFGS on all waves at once; no loader."""

import torch
from torch import nn, optim

import headrace as hr  # headrace


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

    def forward(self, input, future=0):
        outputs = []
        h1 = c1 = h2 = c2 = torch.zeros(input.size(0), 6)
        for x in input.split(1, dim=1):
            h1, c1 = self.lstm1(x, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h1, c1 = self.lstm1(outputs[-1], (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
data = torch.sin((torch.arange(20.0) + torch.randint(-9, 9, (11, 1))) / 3)
input, target = data[3:, :-1], data[3:, 1:]
test_input, test_target = data[:3, :-1], data[:3, 1:]
seq, criterion = Sequence(), nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.3, max_iter=5)
seq, optimizer, _ = hr.setup(seq, optimizer, None)  # headrace
input, target = hr.processes().share((input, target))  # headrace
history = []
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        return loss

    history.append(float(optimizer.step(closure)))
    with torch.no_grad():
        history.append(criterion(seq(test_input, future=5)[:, :-5], test_target).item())

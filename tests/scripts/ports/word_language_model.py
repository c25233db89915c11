"""A language model of words: carried hidden states, clipping, SGD by hand, a rate that falls; no loader."""

import math

import torch
from local_data import tokens
from torch import nn

import headrace as hr  # headrace

WORDS, BATCH, BPTT = 17, 6, 7


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, 8)
        self.rnn = nn.LSTM(8, 8, 2)
        self.decoder = nn.Linear(8, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, WORDS), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        return weight.new_zeros(2, batch, 8), weight.new_zeros(2, batch, 8)


def batchify(data, size):
    length = len(data) // size
    return data[: length * size].view(size, -1).t().contiguous()


def get_batch(source, i):
    length = min(BPTT, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(source.shape[1])
    with torch.no_grad():
        for i in range(0, len(source) - 1, BPTT):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


torch.manual_seed(1111)
here = hr.processes()  # headrace
train_data, val_data = batchify(tokens(400), BATCH), batchify(tokens(90, seed=1), 3)
model, criterion = RNNModel(), nn.CrossEntropyLoss()
model, _, _ = hr.setup(model, None, None)  # headrace
train_data = here.share(train_data, dim=1)  # headrace
lr, best, history = 2.0, None, []
for epoch in range(1, 4):
    model.train()
    hidden = model.init_hidden(train_data.shape[1])
    for i in range(0, len(train_data) - 1, BPTT):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = tuple(each.detach() for each in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        value = here.mean(loss, train_data.shape[1])  # headrace, was: value = loss.item()
        history.append(value)
    val_loss = evaluate(val_data)
    print(f"epoch {epoch} valid loss {val_loss:.2f} ppl {math.exp(val_loss):.2f}")
    history.append(val_loss)
    if best is None or val_loss < best:
        here.on_first(torch.save, model.state_dict(), "model.pt")  # headrace, was: torch.save(model.state_dict(), "model.pt")
        best = val_loss
    else:
        lr /= 4.0
model.load_state_dict(torch.load("model.pt", weights_only=True))

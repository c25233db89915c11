"""Sequences turned around: a GRU encoder, a decoder with attention, padding, teacher forcing drawn by chance, accuracy."""

import random

import torch
from local_data import tokens
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import headrace as hr  # headrace

PAD, SOS, WORDS = 0, 1, 12


class Pairs(Dataset):
    def __init__(self, count, seed):
        text = tokens(count * 8, WORDS - 2, seed) + 2
        self.rows = [text[8 * i : 8 * i + 4 + i % 4] for i in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index].flip(0)


def collate(rows):
    source, target = zip(*rows, strict=True)
    source, target = (pad_sequence(each, batch_first=True, padding_value=PAD) for each in (source, target))
    return functional.pad(source, (0, 7 - source.shape[1])), functional.pad(target, (0, 7 - target.shape[1]))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=PAD)
        self.encoder = nn.GRU(8, 8, batch_first=True)
        self.cell, self.query, self.out = nn.GRUCell(16, 8), nn.Linear(8, 8), nn.Linear(16, WORDS)

    def forward(self, source, target, forces):
        memory, hidden = self.encoder(self.embed(source))
        hidden, word, outputs = hidden[0], torch.full((len(source),), SOS), []
        for i in range(target.shape[1]):
            scores = (memory @ self.query(hidden)[:, :, None])[:, :, 0].masked_fill(source == PAD, -1e9)
            context = (scores.softmax(1)[:, :, None] * memory).sum(1)
            hidden = self.cell(torch.cat([self.embed(word), context], 1), hidden)
            outputs.append(self.out(torch.cat([hidden, context], 1)))
            word = target[:, i] if forces else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


torch.manual_seed(0), random.seed(0)
here = hr.processes()  # headrace
loader = DataLoader(Pairs(46, 0), batch_size=8, shuffle=True, collate_fn=collate)
test_loader = DataLoader(Pairs(17, 1), batch_size=8, collate_fn=collate)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer, loader = hr.setup(model, optimizer, loader, reduction="sum")  # headrace
_, _, test_loader = hr.setup(model, None, test_loader, reduction="sum")  # headrace
history = []
for epoch in range(2):
    for source, target in loader:
        with here.common():  # headrace, was: if True:
            forces = random.random() < 0.5
        logits = model(source, target, forces)
        words = (target != PAD).sum()
        words = here.sum(words)  # headrace
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum") / words
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    right = []
    with torch.no_grad():
        for source, target in test_loader:
            found = model(source, target, False).argmax(2)
            found, target = here.whole((found, target))  # headrace
            right.append(((found == target) | (target == PAD)).all(1))
    history.append(torch.cat(right).double().mean().item())

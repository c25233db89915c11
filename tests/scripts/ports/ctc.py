"""Frames of sound, and words without times: CTC over sequences of unequal lengths."""

import torch
from local_data import tokens
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import headrace as hr  # headrace


def sounds(count):
    drawn = torch.Generator().manual_seed(5)
    text = tokens(count * 5, 6) + 1
    for i in range(count):
        words = text[5 * i : 5 * i + 2 + i % 3]
        frames = functional.one_hot(words.repeat_interleave(3), 7).double()
        yield frames + 0.1 * torch.randn(frames.shape, generator=drawn), words


def collate(rows):
    frames, words = zip(*rows, strict=True)
    lengths = torch.tensor([len(each) for each in frames]), torch.tensor([len(each) for each in words])
    padded = torch.stack([functional.pad(each, (0, 0, 0, 12 - len(each))) for each in frames])
    return padded, torch.stack([functional.pad(each, (0, 4 - len(each))) for each in words]), *lengths


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(7, 10, batch_first=True, bidirectional=True), nn.Linear(20, 7)

    def forward(self, x):
        return functional.log_softmax(self.out(self.rnn(x)[0]), 2).transpose(0, 1)


torch.manual_seed(0)
loader = DataLoader(list(sounds(33)), batch_size=7, shuffle=True, collate_fn=collate)
model = Speech()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = hr.setup(model, optimizer, loader)  # headrace
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=len(loader))
history = []
for epoch in range(2):
    for frames, words, frame_lengths, word_lengths in loader:
        loss = functional.ctc_loss(model(frames), words, frame_lengths, word_lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    history.append(scheduler.get_last_lr()[0])

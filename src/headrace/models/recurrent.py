"""Models with a memory."""

from __future__ import annotations

from torch import Tensor, nn


class CharLSTM(nn.Module):
    """Predicts the next character at every place of a text; each text begins with an empty memory."""

    def __init__(self, vocab: int, embedding: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, characters: Tensor) -> Tensor:
        """Maps character indices `(batch, time)` to logits `(batch, time, vocab)`."""
        states, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.head(states)
        return logits


def char_lstm(vocab: int, embedding: int = 64, hidden: int = 192) -> CharLSTM:
    """Returns an LSTM of one layer over characters."""
    return CharLSTM(vocab, embedding, hidden)

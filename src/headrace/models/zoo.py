"""Classifiers of small images, and a language model of characters."""

from __future__ import annotations

from torch import Tensor, nn


def cnn() -> nn.Sequential:
    """Returns three convolutions and two layers on top: 2.2 million parameters, much computation on each.

    Maps `(batch, 3, 32, 32)` to logits `(batch, 10)`.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 128, kernel_size=3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def fashion_cnn(classes: int = 10) -> nn.Sequential:
    """Returns a model that learns Fashion-MNIST in a minute on two cores: 0.2 million parameters.

    Maps `(batch, 1, height, width)` of any size to logits `(batch, classes)`. The first convolution halves
    the image, which costs little accuracy and saves most of the time.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(7),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class AlexNet(nn.Module):
    """AlexNet for small images: five convolutions, three dense layers, which hold 19 of 20 parameters.

    As in Krizhevsky et al., "ImageNet classification with deep convolutional neural networks", 2012, section 3.5, with
    an eighth of the channels and of the features.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 48, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 48, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(6),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(32 * 6 * 6, 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Maps `(batch, 1, height, width)` of any size to logits `(batch, classes)`."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def alexnet(classes: int = 10) -> AlexNet:
    """Returns an AlexNet for small images: 0.9 million parameters."""
    return AlexNet(classes)


def mlp(features: int = 784, hidden: int = 2048, classes: int = 10) -> nn.Sequential:
    """Returns two hidden layers; with the defaults 5.8 million parameters.

    Maps `(batch, features)` to logits `(batch, classes)`.
    """
    return nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


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

"""A small zoo for examples, tests and benchmarks. Nothing of headrace itself needs it."""

from headrace.models.zoo import AlexNet, CharLSTM, alexnet, char_lstm, cnn, fashion_cnn, mlp

__all__ = ["AlexNet", "CharLSTM", "alexnet", "char_lstm", "cnn", "fashion_cnn", "mlp"]

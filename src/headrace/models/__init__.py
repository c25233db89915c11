"""A small zoo for examples, tests and benchmarks. Nothing of headrace itself needs it."""

from headrace.models.classifiers import AlexNet, alexnet, cnn, fashion_cnn, mlp
from headrace.models.recurrent import CharLSTM, char_lstm

__all__ = ["AlexNet", "CharLSTM", "alexnet", "char_lstm", "cnn", "fashion_cnn", "mlp"]

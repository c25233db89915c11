"""Throughput of the cnn with two workers on one host."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from throughput import main

if __name__ == "__main__":
    main("cnn", Path(__file__).parent)

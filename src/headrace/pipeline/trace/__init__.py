"""From a model to a graph of layers that can be cut into stages."""

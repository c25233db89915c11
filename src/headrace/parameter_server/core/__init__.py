"""Pure state machines of a parameter server: no tensors, sockets, or clocks."""

"""What the hardware gives: matrix products, memory, transfers, storage and known networks, on each device."""

"""One step: gradients to buckets to chunks, transforms, the choice of a compressor, the exchange, the state."""

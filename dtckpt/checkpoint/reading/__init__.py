"""Read checkpoints of this library's format: verified reads of chunks and regions, and of tensors made of pieces."""

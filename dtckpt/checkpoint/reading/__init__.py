"""Read checkpoints of our own format: verified reads of chunks and regions, and of tensors made of pieces."""

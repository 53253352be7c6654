"""Read a checkpoint under another model's names and shapes: stacked, split, transposed and sliced tensors."""

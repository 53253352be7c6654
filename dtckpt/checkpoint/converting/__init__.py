"""Convert a checkpoint to another format: which tensors go where, the files that are written, and the proof."""

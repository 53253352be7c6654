"""Look into checkpoints in bounded memory: differences between two, slices and statistics of a tensor."""

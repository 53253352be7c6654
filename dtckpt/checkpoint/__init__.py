"""Save and restore whole checkpoints, manage those of a training run, and reshard them."""

"""Save and restore whole checkpoints, manage the checkpoints of a training run, and reshard them."""

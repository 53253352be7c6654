"""Save a checkpoint: plan, stage, write, merge, commit."""

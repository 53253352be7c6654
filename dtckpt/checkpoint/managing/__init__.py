"""The checkpoints of a training run: steps, schedule, retention."""

"""Manage the checkpoints of a training run: when to save, which to keep, which to restore."""

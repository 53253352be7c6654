"""Whole checkpoints: save, restore, open."""

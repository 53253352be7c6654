"""Simulate saves, restores and reshards of large models: the plans are real, the devices need not exist."""

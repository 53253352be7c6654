"""Saves: plan, stage, write, merge and commit a checkpoint."""

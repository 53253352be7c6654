"""Restore a checkpoint: into the tensors of a target tree, or as new tensors."""

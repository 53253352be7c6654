"""Restores: into the tensors of a target, or as new tensors."""

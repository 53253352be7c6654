"""Whole files of checkpoints: copies to other storage, and rounds that find and mend damage."""

"""Checkpoints in the memory of the hosts, with copies on other hosts."""

"""Reshard a checkpoint offline: write it anew for another mesh, without the job that saved it."""

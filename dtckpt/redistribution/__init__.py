"""Moves tensors from any layout on any mesh to any other one: plans, exchanges, and their execution."""

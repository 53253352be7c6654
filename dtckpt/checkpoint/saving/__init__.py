"""Saves: what is planned, staged, written, merged and committed."""

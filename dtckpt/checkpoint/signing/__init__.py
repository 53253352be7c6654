"""Signatures of checkpoints: over cryptographic digests of all files, and reads that verify each byte by them."""

"""Who does what, decided purely: chunk grids, writers, reads.

Deterministic: the same inputs give the same plan on every client, byte for byte. Nothing here does I/O or
communicates.
"""

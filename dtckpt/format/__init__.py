"""The checkpoint format as values: names, dtypes, chunk grids, digests, slice strings, state trees, the manifest.

Pure: nothing here does I/O, communicates, or imports torch.
"""

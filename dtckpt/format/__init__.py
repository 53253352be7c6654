"""Our own checkpoint format as values: names, dtypes, chunk grids, digests, state trees, the manifest.

Pure: nothing here does I/O, communicates, or imports torch. Other libraries' formats: `dtckpt.checkpoint.foreign`.
"""

"""The command line tool ``dtckpt``: ``reshard``, ``inspect``, ``verify`` and ``status``."""

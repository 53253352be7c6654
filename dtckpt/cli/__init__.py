"""The command line ``dtckpt``."""

"""The command line tool ``dtckpt``: commands on checkpoints, on folders of them, and on running jobs."""

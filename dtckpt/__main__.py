"""``python -m dtckpt`` is the command ``dtckpt``."""

from dtckpt.cli.main import run

run()

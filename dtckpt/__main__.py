"""``python -m dtckpt`` is the command ``dtckpt``."""

import sys

from dtckpt.cli.main import main

sys.exit(main())

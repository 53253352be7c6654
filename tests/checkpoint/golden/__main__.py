import sys
from pathlib import Path

from tests.checkpoint.golden import write

write(Path(sys.argv[1]))

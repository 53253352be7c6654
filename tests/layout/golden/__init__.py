"""Vectors made by running TensorFlow 2.21 (see ``meta`` in the file)."""

import json
from pathlib import Path
from typing import Any

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "tensorflow.json").read_text())

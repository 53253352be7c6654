"""The examples of docs/zarr.md run, one after the other, as they stand there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "zarr.md"
HAS_ORBAX = importlib.util.find_spec("orbax") is not None


@pytest.mark.share(3, of="processes that start PyTorch")
def test_the_examples_run(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 8
    script = "\n".join(block for block in blocks if HAS_ORBAX or "orbax" not in block)
    checks = "assert elements.dtype == array.dtype == rows.dtype == ml_dtypes.bfloat16\nassert norm.scale.sum() == 64\n"
    if HAS_ORBAX:
        checks += "assert (restored['model/embedding'] == elements).all()\n"
    command = [sys.executable, "-W", "error", "-c", script + checks]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")

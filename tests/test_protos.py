"""The generated message code is the code that the .proto files give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_code_is_up_to_date():
    check = subprocess.run(
        [sys.executable, str(ROOT / "protos" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, f"run `python protos/generate.py`\n{check.stderr}"

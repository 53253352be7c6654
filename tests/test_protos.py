"""The generated message code is of the .proto files as they are."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CURE = "run `make protos`"


def test_generated_code_is_up_to_date():
    written = dict(line.split("  ")[::-1] for line in (ROOT / "protos/generated.sha256").read_text().splitlines())
    generated = [path for path in (ROOT / "dtckpt/_proto").glob("*_pb2*.py*") if path.suffix in (".py", ".pyi")]
    present = {path.relative_to(ROOT).as_posix(): path for path in [*(ROOT / "protos").rglob("*.proto"), *generated]}
    assert written.keys() == present.keys(), CURE
    for name, digest in written.items():
        assert hashlib.sha256(present[name].read_bytes()).hexdigest() == digest, f"{name}: {CURE}"

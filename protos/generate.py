"""Regenerate ``dtckpt/_proto`` from the ``.proto`` files beside this script; ``make protos`` runs it.

It needs ``requirements.txt``. What it read and wrote stands in ``generated.sha256``, by which a test notices that the
files have changed since; ``sha256sum --check protos/generated.sha256`` does so by hand.

The generated modules are flat (``dtckpt._proto.layout_pb2``) and import each other from there, so that they need no
top-level package of the proto path's name. File names are therefore unique over all proto packages.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "dtckpt" / "_proto"
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?")
DIGESTS = PROTOS / "generated.sha256"


def generate() -> dict[str, str]:
    """Return the text of every generated file by its name."""
    from google.rpc import status_pb2
    from grpc_tools import protoc

    folders = PROTOS, Path(status_pb2.__file__).parents[2], Path(protoc.__file__).parent / "_proto"
    found_in = [f"--proto_path={folder}" for folder in folders]  # ours, google/rpc, google/protobuf
    sources = sorted(PROTOS.rglob("*.proto"))
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    with tempfile.TemporaryDirectory() as scratch:
        for source in sources:
            outputs = [f"--python_out={scratch}", f"--mypy_out=quiet:{scratch}"]
            if re.search(r"^service\s", source.read_text(), re.MULTILINE):
                outputs += [f"--grpc_python_out={scratch}", f"--mypy_grpc_out=quiet:{scratch}"]
            if protoc.main(["protoc", *found_in, *plugins, *outputs, str(source.relative_to(PROTOS))]):
                raise SystemExit(f"protoc failed on {source}")
        written = [path for path in sorted(Path(scratch).rglob("*")) if path.is_file()]
        return {path.name: flatten(path.read_text(), sources) for path in written}


def flatten(text: str, sources: list[Path]) -> str:
    """Rewrite imports of generated modules to the flat package."""
    for source in sources:
        folder = ".".join(source.relative_to(PROTOS).parent.parts)
        module = f"{source.stem}_pb2"
        text = text.replace(f"from {folder} import {module}", f"from dtckpt._proto import {module}")
        text = text.replace(f"{folder}.{module}", f"dtckpt._proto.{module}")
    return text


def digests() -> str:
    """Return the digests of the sources and of the generated files, as ``sha256sum`` prints them."""
    generated = (path for path in TARGET.iterdir() if GENERATED.fullmatch(path.name))
    files = [*sorted(PROTOS.rglob("*.proto")), *sorted(generated)]
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}\n" for path in files)


def main() -> None:
    """Write the generated modules, and the digests."""
    wanted = generate()
    for path in TARGET.iterdir():
        if GENERATED.fullmatch(path.name):
            path.unlink()
    for name, text in wanted.items():
        (TARGET / name).write_text(text)
    DIGESTS.write_text(digests())


if __name__ == "__main__":
    main()

"""Regenerate ``dtckpt/_proto`` from the ``.proto`` files beside this script.

``python protos/generate.py`` writes, ``python protos/generate.py --check`` exits 1 when something is stale.

The generated modules are flat (``dtckpt._proto.layout_pb2``) and import each other from there, so that they need no
top-level package of the proto path's name. File names are therefore unique over all proto packages.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "dtckpt" / "_proto"
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when generated code is stale")
    check = parser.parse_args().check
    wanted = generate()
    present = {path.name: path.read_text() for path in TARGET.iterdir() if GENERATED.fullmatch(path.name)}
    stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    for name in stale:
        if check:
            sys.stderr.write(f"stale: {TARGET / name}\n")
        elif name in wanted:
            (TARGET / name).write_text(wanted[name])
        else:
            (TARGET / name).unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Messages and stubs, generated from ``protos/``. A library that is too old for them is named when they are imported.

Generated code needs the version of protobuf with which it was made, or a newer one, and the code of other libraries is
made with newer versions than ours. pip only warns when it installs an older protobuf for another package.
"""

from __future__ import annotations

import importlib
import re

from dtckpt.errors import DependencyError

COORDINATOR = ("google.rpc.status_pb2", "google.rpc.error_details_pb2", "dtckpt._proto.coordinator_pb2_grpc")
"""The generated modules of whoever speaks with a coordinator."""
_OLDEST_PROTOBUF = "6.30.0"
_DISTRIBUTIONS = {
    "google": "googleapis-common-protos",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
"""The distribution of a top-level package with generated code."""
_COMPLAINTS = {
    "protobuf": re.compile(r"gencode (?P<needed>\S+) runtime (?P<installed>[\d.]*\d)"),
    "grpcio": re.compile(r"installed is at version (?P<installed>\S+), but .* grpcio>=(?P<needed>[\d.]*\d)"),
}
"""How generated code says that a library is too old."""


def require(*modules: str) -> None:
    """Import modules of generated code.

    Raises:
        DependencyError: The installed protobuf or gRPC is too old for one of the modules.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            library, installed, needed = _too_old(error)
            if not library:
                raise
            raise DependencyError(_cure(module, library, installed, needed)) from None


def _too_old(error: Exception) -> tuple[str, str, str]:
    """Return which library is too old, its version and the needed one; "" for a library if the error says none."""
    for library, complaint in _COMPLAINTS.items():
        if match := complaint.search(str(error)):
            return library, match["installed"], match["needed"]
    if isinstance(error, ImportError) and "runtime_version" in str(error):  # protobuf before 5.26 lacks that
        import google.protobuf

        return "protobuf", google.protobuf.__version__, _OLDEST_PROTOBUF
    return "", "", ""


def _cure(module: str, library: str, installed: str, needed: str) -> str:
    other = _DISTRIBUTIONS.get(module.partition(".")[0])
    keep = f", or pip install '{library}=={installed}' {other} to keep {installed}" if other else ""
    who = other or "dtckpt"
    return f"{who} needs {library} {needed} or newer; got {installed}; run pip install '{library}>={needed}'{keep}"


require("dtckpt._proto.layout_pb2")

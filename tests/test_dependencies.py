"""A library that another package has replaced by an older one is named in one line, with the command that cures it."""

import re
import subprocess
import sys

import pytest

from dtckpt import _proto

OLD = "from google.protobuf import runtime_version as v; v.MAJOR, v.MINOR, v.PATCH = {}, {}, {}\n"
"""Makes the installed protobuf an older one, for generated code."""
SERVER = "from dtckpt_server.main import main; main(['serve', '--insecure', '--port', '0'])"
COMMAND = "import sys; from dtckpt.cli.main import main; sys.exit(main({!r}))"
CLIENT = "import dtckpt; dtckpt.initialize_multi_client('localhost:1')"


def run(program, *version):
    """Run a program, with an older protobuf if one is given; return its exit code and the lines of its errors."""
    program = (OLD.format(*version) if version else "") + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.processes
@pytest.mark.parametrize("program", [SERVER, COMMAND.format(["inspect", "."])], ids=["server", "inspect"])
def test_protobuf_that_is_older_than_our_code(program):
    code, lines = run(program, 5, 29, 6)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].endswith(
        "error: dtckpt needs protobuf 6.30.0 or newer; got 5.29.6; run pip install 'protobuf>=6.30.0'"
    )


@pytest.mark.processes
@pytest.mark.parametrize("program", [SERVER, COMMAND.format(["status", "--coordinator", "localhost:1"])])
def test_protobuf_that_is_older_than_the_code_of_other_libraries(program):
    """Their code is made with newer releases, as of gRPC's health service."""
    code, lines = run(program, 6, 30, 0)
    assert (code, len(lines)) == (2, 1), lines
    assert re.search(
        r": googleapis-common-protos needs protobuf (\S+) or newer; got 6\.30\.0; run pip install 'protobuf>=\1', "
        r"or pip install 'protobuf==6\.30\.0' googleapis-common-protos to keep 6\.30\.0$",
        lines[0],
    )


@pytest.mark.processes
def test_clients_raise_what_to_do():
    code, lines = run(CLIENT, 6, 30, 0)
    assert code == 1
    assert lines[-1].startswith(
        "dtckpt.errors.DependencyError: googleapis-common-protos needs protobuf 6.33.5 or newer"
    )
    code, lines = run("import dtckpt; dtckpt.Layout", 5, 29, 6)
    assert lines[-1].startswith("dtckpt.errors.DependencyError: dtckpt needs protobuf 6.30.0 or newer; got 5.29.6")


@pytest.mark.processes
def test_protobuf_that_cannot_tell_its_version():
    """The version before 5.26."""
    hide = (
        "import sys, google.protobuf as p\n"
        "del p.runtime_version; sys.modules[v.__name__] = None; p.__version__ = '4.25.8'\n"
    )
    code, lines = run(hide + SERVER, 4, 25, 8)
    assert (code, len(lines)) == (2, 1), lines
    assert "dtckpt needs protobuf 6.30.0 or newer; got 4.25.8" in lines[0]


@pytest.mark.processes
def test_grpc_that_is_older_than_our_code():
    code, lines = run("import grpc; grpc.__version__ = '1.60.0'\n" + SERVER)
    assert code == 2
    assert "needs grpcio 1.72.2 or newer; got 1.60.0; run pip install 'grpcio>=1.72.2'" in lines[-1]


def test_other_errors_are_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="nothing_pb2"):
        _proto.require("dtckpt._proto.nothing_pb2")

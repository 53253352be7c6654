import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import UNSHARDED, Layout, abstract_mesh, errors
from dtckpt.cli import inspect
from dtckpt.cli.exit_codes import EXIT_CODES, MEANINGS, ExitCode, exit_code_of

from .conftest import COMMAND, run_on_terminal, run_process


def test_help_and_version_import_nothing_heavy(run):
    code = (
        "import sys; from dtckpt.cli.main import main; codes = [int(main(args.split())) for args in sys.argv[1:]]; "
        "print(codes, sorted({'torch', 'numpy', 'tensorstore', 'rich'} & set(sys.modules)))"
    )
    asked = ("--help", "reshard --help", "inspect -h", "help gc", "help exit-codes", "completion zsh", "--version")
    result = run_process(*asked, program=("-c", code))
    assert result.out.endswith("\n[0, 0, 0, 0, 0, 0, 0] []\n"), result
    for code in ExitCode:
        assert f"{code:>3}  {MEANINGS[code]}" in run("help", "exit-codes").out
    assert run("--version").out == f"dtckpt {dtckpt.__version__}\n"


LOOKING = """
import sys
from dtckpt.cli.main import main
code = main(sys.argv[1:])
print(sorted({'torch', 'grpc', 'rich', 'tensorstore'} & set(sys.modules)))
sys.exit(code)
"""


LOOKS = [
    (["inspect", "{}"], []),
    (["inspect", "--json", "--chunks", "{}"], []),
    (["inspect", "--tree", "{}"], []),
    (["verify", "{}"], ["tensorstore"]),
    (["diff", "{}", "{}"], []),
    (["diff", "{}", "{}", "--no-values"], []),
    (["cat", "--stats", "{}", "b"], ["tensorstore"]),
    (["ls", "{}/.."], []),
    (["gc", "{}/..", "--keep", "1"], []),
    (["simulate", "llama-3-8b", "--mesh", "x=2", "-o", "{}.svg"], []),
    (["reshard", "{}", "{}_new", "--mesh", "x=2", "--dry-run"], []),
    (["reshard", "{}", "{}_new", "--mesh", "x=2", "--dry-run", "--json", "--workers", "2", "--worker", "0"], []),
]
"""Arguments of commands that only look, and the modules that they need for a checkpoint in a database."""


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.share(4)
@pytest.mark.parametrize(("args", "modules"), LOOKS, ids=" ".join)
def test_commands_that_look_import_no_torch(looked_at, args, modules, kvstore):
    folder = looked_at / kvstore
    result = run_process(*[arg.format(folder) for arg in args], program=("-c", LOOKING))
    assert result.code == 0, result
    # What a database's nodes say, only TensorStore knows.
    assert result.out.splitlines()[-1] == str(modules if kvstore == "ocdbt" else [])
    if args == ["inspect", "{}"]:
        shown = ["config/dtype  torch.bfloat16", "config/on     device('cuda:1')", "config/shape  torch.Size([2, 3])"]
        assert all(line in result.out for line in shown), result.out


ALL_LOOKS = """
import json, sys
from dtckpt.cli.main import main
for args in json.loads(sys.argv[1]):
    code = main(args)
    assert code == 0 and not {'torch', 'grpc', 'rich'} & set(sys.modules), (code, args)
"""


def test_all_commands_that_look_import_no_torch(looked_at):
    """All in one process, every day: it tells less than a process for each command, and takes less."""
    folder = looked_at / "zarr"
    commands = [[arg.format(folder) for arg in args] for args, _ in LOOKS]
    result = run_process(json.dumps(commands), program=("-c", ALL_LOOKS))
    assert result.code == 0, result


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A folder of checkpoints whose trees hold values of PyTorch."""
    folder = tmp_path_factory.mktemp("looked_at")
    config = {"dtype": torch.bfloat16, "on": torch.device("cuda:1"), "shape": torch.Size([2, 3])}
    parts = dtckpt.TensorParts({"q": torch.arange(6)}, "Quantized", torch.Size([2, 3]), ())
    for kvstore in ("ocdbt", "zarr"):
        options = dtckpt.SaveOptions(kvstore=kvstore)
        dtckpt.save(folder / kvstore, {"config": config, "w": parts, "b": torch.ones(3)}, options=options)
    return folder


def test_the_script_is_installed(source):
    script = os.path.join(os.path.dirname(sys.executable), "dtckpt")
    done = subprocess.run([script, "inspect", source], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_whole_run(run, source, tmp_path):
    result = run_process("reshard", source, tmp_path / "new", "--mesh", "x=4", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.events[-1]["event"] == "done"
    result = run("reshard", source, tmp_path / "new", "--mesh", "x=4", "--json").fails(4, "--overwrite")
    assert result.events[-1]["exit_code"] == 4


def test_a_bar_only_on_a_terminal(run, source, tmp_path):
    on_terminal = run_on_terminal("reshard", source, tmp_path / "a", "--mesh", "x=4")
    assert on_terminal.code == 0
    shown = on_terminal.out
    assert "━" in shown
    assert "resharded" in shown
    result = run("reshard", source, tmp_path / "b", "--mesh", "x=4")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_usage_errors_have_the_form_of_all_errors(run):
    run().fails(2, "Missing command; see 'dtckpt --help'")
    run("rehsard").fails(2, "No such command 'rehsard'")
    result = run("reshard", "a", "b", "--json").fails(2, "--mesh")
    assert result.events == [
        {"event": "error", "code": "MissingParameter", "exit_code": 2, "message": result.events[0]["message"]}
    ]
    run("reshard", "a", "--mesh", "x=2", "--", "--json").fails(3)


def test_debug_shows_a_traceback(run, tmp_path):
    assert "Traceback" not in run("inspect", tmp_path / "none").err
    for args in (("inspect", tmp_path / "none", "--debug"), ("--debug", "inspect", tmp_path / "none")):
        result = run(*args)
        assert result.code == 3
        assert result.err.startswith("Traceback (most recent call last):\n")
        assert result.err.splitlines()[-1].startswith("dtckpt: error: ")


ERRORS = [
    (errors.CheckpointNotFoundError, 3),
    (errors.CheckpointIncompleteError, 3),
    (errors.TensorNotFoundError, 3),
    (errors.RegionNotFoundError, 3),
    (errors.JobNotFoundError, 3),
    (errors.CheckpointExistsError, 4),
    (errors.CheckpointConflictError, 4),
    (errors.BarrierConflictError, 4),
    (errors.FencedError, 4),
    (errors.CheckpointCorruptError, 1),
    (errors.CheckpointVersionError, 1),
    (errors.ReplicaMismatchError, 1),
    (errors.LayoutTypeError, 2),
    (errors.MeshError, 2),
    (errors.ConfigError, 2),
    (errors.DTypeError, 2),
    (errors.TensorNameError, 2),
    (errors.StoragePermissionError, 69),
    (errors.CoordinatorUnavailableError, 69),
    (errors.CoordinatorPermissionError, 69),
    (errors.StorageError, 75),
    (errors.StorageFullError, 75),
    (errors.BarrierTimeoutError, 75),
    (errors.ClientLostError, 75),
    (OSError, 75),
    (ZeroDivisionError, 70),
]


@pytest.mark.parametrize(("kind", "code"), ERRORS)
def test_every_exit_code(run, monkeypatch, kind, code):
    def fail(**options):
        raise kind("it\nbroke")

    monkeypatch.setattr(inspect.command, "callback", fail)
    result = run("inspect", "p", "--json").fails(code, "it\\nbroke")
    assert result.events[0]["code"] == kind.__name__
    if code == 70:
        assert "internal error: ZeroDivisionError" in result.err


def test_every_error_has_an_exit_code_with_a_meaning():
    assert set(MEANINGS) == set(ExitCode)
    assert set(EXIT_CODES.values()) | {ExitCode.OK} == set(ExitCode)
    for kind in errors._tree(errors.DtckptError):
        assert exit_code_of(kind("x")) is not ExitCode.INTERNAL


def test_a_reader_that_has_had_enough(source):
    with subprocess.Popen(
        [*COMMAND, "inspect", str(source), "--chunks"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written(source):
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "inspect", source]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180, check=False)
    assert done.returncode == 75
    assert done.stderr.startswith("dtckpt: error: [Errno 28]")


def test_interrupt(source, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from dtckpt.cli.main import main\n"
        "from dtckpt.cli.reshard_progress import ProgressReporter\n"
        "ProgressReporter.advance = lambda self, name, nbytes: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    result = run_process("reshard", source, tmp_path / "new", "--mesh", "x=4", program=("-c", program))
    command = shlex.join(["dtckpt", "reshard", str(source), str(tmp_path / "new"), "--mesh", "x=4", "--resume"])
    assert (result.code, result.out) == (130, "")
    assert result.err == f"dtckpt: interrupted, and nothing is committed; to go on: {command}\n"
    assert os.listdir(tmp_path) == []


# --- memory ---------------------------------------------------------------------------------------------------------

# Not ru_maxrss: a child inherits the value of its parent, which may be larger.
MEASURED = (
    "import re, sys\n"
    "from dtckpt.cli.main import main\n"
    "code = main(sys.argv[1:])\n"
    "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])\n"
    "sys.exit(code)\n"
)


def _peak_nbytes(*args, code=0):
    result = run_process(*args, program=("-c", MEASURED))
    assert result.code == code, result
    return int(result.out.splitlines()[-1]) << 10


@pytest.mark.share(1, of="memory of commands")
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_memory_stays_within_the_bound(tmp_path, kvstore, record_property):
    """256 MiB from rows to columns in 32 MiB, so that every stored chunk is needed by every new one."""
    rows = abstract_mesh({"x": 4})
    whole = torch.arange(64 << 20, dtype=torch.float32).reshape(8192, 8192)
    dtckpt.save(tmp_path / "old", {"w": packed(whole, Layout(["x", UNSHARDED], rows))})
    dtckpt.save(tmp_path / "small", {"w": torch.ones(4, 4)})
    args = ("--mesh", "y=4", "--layout", "w=unsharded,y", "--max-memory", "32MiB", "--format", kvstore)
    baseline = _peak_nbytes("reshard", tmp_path / "small", tmp_path / "small_new", *args)
    peak = _peak_nbytes("reshard", tmp_path / "old", tmp_path / "new", *args) - baseline
    print(f"peak above the baseline: {peak / 2**20:.0f} MiB")
    record_property("peak_nbytes", peak)
    # Beside the bound: the stored chunk (16 MiB) that is mapped while it is copied, which is page cache but counts
    # as resident; a chunk that the reader still refers to while it starts the next; threads, code pages and heap.
    assert peak < (32 + 16 + 16 + 8) << 20
    with dtckpt.open_checkpoint(tmp_path / "new") as new:
        assert torch.equal(new.read("w"), whole)


@pytest.mark.share(1, of="memory of commands")
@pytest.mark.share(1)
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_memory_of_commands_that_read_elements(tmp_path, codec, record_property):
    """Memory of commands on two checkpoints of 96 MiB."""
    options = dtckpt.SaveOptions(codec=codec, chunk_nbytes=4 << 20)
    whole = torch.arange(24 << 20, dtype=torch.float32).reshape(6144, 4096)
    for name, tensor in (("a", whole), ("b", whole + 1), ("small", torch.ones(4)), ("small_b", torch.zeros(4))):
        dtckpt.save(tmp_path / name, {"w": tensor}, options=options)
    small = _peak_nbytes("diff", tmp_path / "small", tmp_path / "small_b", "--values", code=1)
    for *args, code in (
        ("diff", tmp_path / "a", tmp_path / "b", "--values", 1),
        ("cat", tmp_path / "a", "w", "--stats", 0),
    ):
        peak = _peak_nbytes(*args, "--max-memory", "32MiB", code=code) - small
        record_property(f"peak_nbytes of {args[0]}", peak)
        print(f"{args[0]}: peak above the baseline: {peak / 2**20:.0f} MiB")
        # Beside the bound: threads, code pages and heap of the decoder.
        assert peak < (32 + 16) << 20

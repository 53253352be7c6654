"""The time of saves and restores, and all places that show it: reports, handles, the manifest, the log, heartbeats,
spans, a bar."""

import io
import itertools
import logging
import subprocess
import sys

import pytest
import torch
from support.states import packed

import dtckpt
from dtckpt import Layout, RestoreOptions, SaveOptions, abstract_mesh
from dtckpt.checkpoint import timing as measuring
from dtckpt.checkpoint.timing import Phases, Written, find_slow
from dtckpt.coordination.api import MAX_PAYLOAD_BYTES
from dtckpt.errors import CheckpointExistsError
from dtckpt.format.manifest import PhaseCost

from . import timing_cases

MESH = abstract_mesh({"x": 2})
TREE = {"w": torch.arange(3000.0), "v": packed(torch.ones(64), Layout(["x"], MESH)), "step": 3}
NBYTES = 3064 * 4


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes one second further at each look."""
    ticks = itertools.count()
    monkeypatch.setattr(measuring, "monotonic", lambda: float(next(ticks)))


# --- measuring ---


def test_phases_come_one_after_the_other_and_inside_each_other(clock):
    told = []
    phases = Phases("save", 0, told.append)
    phases.enter("written")
    phases.expect("write", 100 << 20)
    with phases.measure("plan"):
        pass
    with phases.measure("write"):
        phases.count(10 << 20)
        with phases.measure("move"):
            phases.count(5)
        phases.count(30 << 20)
        # 1 s before `move`, 1 s until the heartbeat was told, 1 s until now; none while `move` went on.
        assert phases.costs["write"] == PhaseCost(3.0, 40 << 20)
    with phases.measure("plan"):
        phases.count(7)
    assert phases.costs == {
        "plan": PhaseCost(2.0, 7),
        "move": PhaseCost(1.0, 5),
        "write": PhaseCost(4.0, 40 << 20),
    }
    assert phases.progress == (40 << 20, 100 << 20)
    assert [(each.phase, each.bytes_done >> 20, each.bytes_total >> 20) for each in told] == [
        ("save/written", 0, 0),
        ("save/written", 40, 100),
    ]


def test_a_phase_that_fails_is_measured(clock):
    phases = Phases("save", 0, lambda _: None)
    with pytest.raises(ZeroDivisionError), phases.measure("write"):
        1 / 0  # noqa: B018
    assert phases.costs == {"write": PhaseCost(1.0)}


def test_what_a_client_announces_fits_a_payload():
    names = ("plan", "stage", "edges", "write", "merge", "barrier")
    costs = {name: PhaseCost(1e7, 1 << 62) for name in names}
    data = Written((1 << 64) - 1, costs).to_bytes()
    assert len(data) < MAX_PAYLOAD_BYTES // 8
    assert Written.from_bytes(data) == Written((1 << 64) - 1, costs)


# --- reports and the manifest ---


def test_reports_and_the_manifest(tmp_path):
    report = dtckpt.save(tmp_path / "s", TREE)
    assert list(report.phases) == ["plan", "write", "merge"]
    assert report.phases["write"].nbytes == report.client_nbytes == report.nbytes == NBYTES
    assert all(cost.seconds > 0 for cost in report.phases.values())
    assert report.total_s == sum(cost.seconds for cost in report.phases.values())
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        ((client, costs),) = checkpoint.manifest.costs.items()
    assert (client, list(costs), costs["write"].nbytes) == (0, ["plan", "write"], NBYTES)
    assert costs["plan"].seconds == pytest.approx(report.phases["plan"].seconds, abs=1e-6)
    found = []
    dtckpt.restore(tmp_path / "s", {**TREE}, options=RestoreOptions(report=found.append))
    assert list(found[0].phases) == ["plan", "read"]
    assert found[0].phases["read"].nbytes == found[0].nbytes_read == NBYTES
    copies = packed(torch.ones(64), Layout(["unsharded"], MESH))
    dtckpt.restore(tmp_path / "s", {**TREE, "v": copies}, options=RestoreOptions(report=found.append))
    assert found[1].phases["move"].nbytes == 64 * 4  # one of two copies comes from the other


@pytest.mark.processes
def test_every_client_s_phases_are_in_the_manifest(pool, tmp_path, meeting):
    from . import client_cases

    tensors = {"w": ((12, 4), "float32", ["x", "unsharded"]), "uneven": ((50257,), "int64", [("x", "y")])}
    reports = pool.values(
        client_cases.save, f"{tmp_path}/s", {"x": 3, "y": 2}, tensors, devices=2, clients=3, **meeting
    )
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        costs = checkpoint.manifest.costs
        nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    assert list(costs) == [0, 1, 2]
    assert all(list(own) == ["plan", "barrier", "edges", "write"] for own in costs.values())
    assert sum(own["write"].nbytes for own in costs.values()) == nbytes
    for client, report in enumerate(reports):
        for phase in ("plan", "edges"):
            assert costs[client][phase].seconds == pytest.approx(report["phases"][phase].seconds, abs=1e-6)
        # It waits once more after it has said what it took so far.
        assert costs[client]["barrier"].seconds < report["phases"]["barrier"].seconds


# --- slow clients ---


def test_who_is_slow():
    usual = {"write": PhaseCost(2.0, 100), "plan": PhaseCost(0.1)}
    late = {"write": PhaseCost(9.0, 500), "plan": PhaseCost(0.1)}
    slow = find_slow({0: usual, 1: usual, 2: late, 3: usual})
    assert (slow.client, slow.phase, slow.cost, slow.median) == (2, "write", late["write"], usual["write"])
    assert str(slow) == (
        "client 2 is slow: its phase 'write' took 9.000 s for 500 B; median of the others: 2.000 s for 100 B"
    )
    # Of two clients the other is the median; the phase that costs the others most is named.
    assert find_slow({0: late, 1: {"write": PhaseCost(1.0), "plan": PhaseCost(50.0)}}).phase == "plan"


@pytest.mark.parametrize(
    "costs",
    [
        {0: {"write": PhaseCost(9.0)}},
        {0: {"write": PhaseCost(2.0)}, 1: {"write": PhaseCost(5.0)}},  # not so much slower
        {0: {"write": PhaseCost(0.1)}, 1: {"write": PhaseCost(0.9)}},  # no client fails
        {0: {"barrier": PhaseCost(0.1)}, 1: {"barrier": PhaseCost(99.0)}},  # it waited
        {0: {"write": PhaseCost(0.1)}, 1: {}},
        {},
    ],
)
def test_nobody_is_slow(costs):
    assert find_slow(costs) is None


@pytest.mark.processes
def test_the_leader_names_the_slow_client(pool, tmp_path):
    tensors = {name: ((6, 2), "float32", ["x", "unsharded"]) for name in "ab"}
    warnings = pool.values(timing_cases.save_with_slow_client, f"{tmp_path}/s", tensors, 2, clients=3)
    (warning,), *others = warnings
    assert warning.startswith(f"save of {tmp_path}/s: client 2 is slow: its phase 'write' took 200.")
    assert "s for 32 B; median of the others: 0." in warning
    assert others == [[], []]


@pytest.mark.processes
def test_so_it_does_after_a_restore(pool, tmp_path):
    tensors = {name: ((6, 2), "float32", ["x", "unsharded"]) for name in "ab"}
    (warning,), *others = pool.values(timing_cases.restore_with_slow_client, f"{tmp_path}/s", tensors, 1, clients=3)
    assert warning.startswith(f"restore of {tmp_path}/s: client 1 is slow: its phase 'read' took 100.")
    assert "s for 32 B; median of the others: 0." in warning
    assert others == [[], []]


# --- the log ---


def test_the_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "dtckpt.checkpoint")
    dtckpt.save(tmp_path / "s", TREE)
    dtckpt.restore(tmp_path / "s")
    with pytest.raises(CheckpointExistsError):
        dtckpt.save(tmp_path / "s", TREE)
    found = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "dtckpt.checkpoint"]
    path = tmp_path / "s"
    starts = [
        ("DEBUG", f"save of {path}: plan took "),
        ("DEBUG", f"save of {path}: write took "),
        ("DEBUG", f"save of {path}: merge took "),
        ("INFO", f"save of {path}: done on client 0 in "),
        ("DEBUG", f"restore of {path}: plan took "),
        ("DEBUG", f"restore of {path}: read took "),
        ("INFO", f"restore of {path}: done on client 0 in "),
        ("DEBUG", f"save of {path}: plan took "),
        ("INFO", f"save of {path}: failed in round 'begin' (CheckpointExistsError) on client 0 in "),
    ]
    assert len(found) == len(starts)
    for (level, text), (expected, start) in zip(found, starts, strict=True):
        assert (level, text[: len(start)]) == (expected, start)
    assert " for 12.0 KiB on client 0" in found[1][1]


# --- a bar ---


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", ["save", "save_async", "restore"])
@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_on_a_terminal_if_it_is_asked_for(tmp_path, monkeypatch, kind, progress):
    terminal = Terminal()
    if kind == "restore":
        dtckpt.save(tmp_path / "s", TREE)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        if kind == "save":
            dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(progress=progress))
        elif kind == "save_async":
            dtckpt.save_async(tmp_path / "s", TREE, options=SaveOptions(progress=progress)).result(30)
        else:
            dtckpt.restore(tmp_path / "s", options=RestoreOptions(progress=progress))
    shown = terminal.getvalue()
    if progress:
        assert f"{kind.removesuffix('_async')} {tmp_path}/s" in shown
        assert "12.0/12.0 KiB" in shown
        assert shown.endswith("\x1b[2K")  # and gone
    else:
        assert shown == ""


def test_no_bar_where_nobody_watches(tmp_path, capsys):
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(progress=True))
    assert capsys.readouterr() == ("", "")


# --- spans ---


@pytest.fixture
def spans(monkeypatch):
    """The finished spans of a tracer provider that keeps them, in the order of their ends."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


@pytest.mark.parametrize("kind", ["save", "save_async"])
def test_spans_of_a_save_and_a_restore(tmp_path, spans, kind):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import use_span

    caller = TracerProvider().get_tracer("caller").start_span("step")
    with use_span(caller):
        if kind == "save":
            dtckpt.save(tmp_path / "s", TREE)
        else:
            dtckpt.save_async(tmp_path / "s", TREE).result(30)
        dtckpt.restore(tmp_path / "s")
    stage = ["dtckpt.save.stage"] if kind == "save_async" else []
    saving = ["dtckpt.save.plan", *stage, "dtckpt.save.write", "dtckpt.save.merge", "dtckpt.save"]
    reading = ["dtckpt.restore.plan", "dtckpt.restore.read", "dtckpt.restore"]
    found = spans()
    assert [span.name for span in found] == [*saving, *reading]
    by_name = {span.name: span for span in found}
    for span in found:
        operation = span.name.split(".")[1]
        above = by_name[f"dtckpt.{operation}"].context if span.name.count(".") == 2 else caller.get_span_context()
        assert span.parent.span_id == above.span_id
        assert span.status.is_ok is not False
    assert by_name["dtckpt.save"].attributes == {
        "dtckpt.path": f"{tmp_path}/s",
        "dtckpt.client": 0,
        "dtckpt.nbytes": NBYTES,
    }
    assert by_name["dtckpt.save.write"].attributes == {"dtckpt.nbytes": NBYTES, "dtckpt.round": "written"}
    assert by_name["dtckpt.restore.read"].attributes == {"dtckpt.nbytes": NBYTES, "dtckpt.round": "read"}


def test_spans_of_a_save_that_fails(tmp_path, spans):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        dtckpt.save(tmp_path / "s", TREE)
    assert [span.name for span in spans()] == ["dtckpt.save.plan", "dtckpt.save"]
    for span in spans():
        assert not span.status.is_ok
        assert span.status.description.startswith("CheckpointExistsError: ")
        assert [event.name for event in span.events] == ["exception"]


@pytest.mark.share(3, of="processes that start PyTorch")
def test_nothing_is_imported_where_there_is_no_opentelemetry(tmp_path):
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'opentelemetry':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import torch, dtckpt\n"
        "dtckpt.save(sys.argv[1], {'w': torch.ones(2)})\n"
        "print(dtckpt.restore(sys.argv[1])['w'].tolist(), [name for name in sys.modules if 'opentelemetry' in name])\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "s")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1.0, 1.0] []\n"

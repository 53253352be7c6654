"""``dtckpt diff``: show the differences between two checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.inspecting.compare import plan_comparison
from dtckpt.checkpoint.inspecting.difference import (
    ContentDigest,
    Difference,
    DifferenceKind,
    DiffReport,
    Fact,
    PlainValue,
    StoredDtype,
    TensorFacts,
)
from dtckpt.checkpoint.inspecting.element_differences import ElementDifferences, Extreme
from dtckpt.checkpoint.inspecting.tensor_comparison import Reads
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.freed_memory import return_freed_memory
from dtckpt.cli.name_groups import group_names
from dtckpt.cli.output import (
    format_count,
    format_layout,
    format_shape,
    format_value,
    is_quiet,
    open_progress,
    table_lines,
    write_event,
)
from dtckpt.cli.pager import page
from dtckpt.cli.plain_arguments import parse_pairs, parse_size
from dtckpt.errors import format_nbytes, printable
from dtckpt.format.plain_values import encode_value
from dtckpt.layout.layout import Layout

_READS = {None: Reads.NEEDED, True: Reads.DIFFERENT, False: Reads.NONE}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    a: str
    b: str
    values: bool | None
    select: Sequence[str]
    renames: Sequence[str]
    ignore: Sequence[str]
    max_memory: str
    pager: bool
    as_json: bool


def run_diff(request: DiffRequest) -> ExitCode:
    """Run the command.

    Returns:
        `ExitCode.FAILED` if the checkpoints differ, or something was not compared.

    Raises:
        ConfigError: An option cannot be used.
        TensorNotFoundError: A glob matches nothing.
        CheckpointError: As for `dtckpt.open_checkpoint`.
    """
    return_freed_memory()
    max_memory = parse_size(request.max_memory)
    renames: dict[str | re.Pattern[str], str] = dict(parse_pairs(request.renames, "rename", "OLD=NEW").items())
    with open_checkpoint(request.a) as a, open_checkpoint(request.b) as b, ExitStack() as stack:
        comparison = plan_comparison(
            a,
            b,
            select=request.select,
            rename=renames or None,
            reads=_READS[request.values],
            ignore=frozenset(map(DifferenceKind, request.ignore)),
        )
        progress = None
        if comparison.nbytes:
            progress = stack.enter_context(open_progress("comparing", comparison.nbytes)).advance
        report = comparison.run(max_memory=max_memory, progress=progress)
    if request.as_json:
        _write_json(report)
    else:
        page(_lines(report), is_wanted=request.pager)
    return ExitCode.OK if report.is_same else ExitCode.FAILED


# --- JSON -------------------------------------------------------------------------------------------------------------


def _write_json(report: DiffReport) -> None:
    for difference in report.differences:
        facts: dict[str, Any] = {"a": _fact_json(difference.a), "b": _fact_json(difference.b)}
        if difference.elements is not None:
            facts |= _elements_json(difference.elements)
        if difference.reason:
            facts["reason"] = difference.reason
        write_event("difference", path=difference.path, kind=difference.kind, **facts)
    write_event(
        "diff",
        a=str(report.a),
        b=str(report.b),
        is_same=report.is_same,
        differences=len(report.differences),
        tensors=report.num_tensors,
        values=report.num_values,
        by_digest=report.num_by_digest,
        read=report.num_read,
        bytes=report.nbytes,
        seconds=round(report.seconds, 6),
    )


def _fact_json(fact: Fact) -> Any:
    match fact:
        case TensorFacts():
            return {"shape": fact.shape, "dtype": fact.dtype, "bytes": fact.nbytes}
        case PlainValue():
            node = json.loads(fact.node)
            return node.get("value", node)
        case StoredDtype():
            return {"dtype": fact.dtype, "stored_dtype": fact.stored}
        case ContentDigest():
            return f"{fact.digest:016x}"
        case Layout():
            return {"sharding_specs": fact.sharding_specs, "mesh": fact.mesh.axis_sizes}
        case _:
            return fact


def _elements_json(elements: ElementDifferences) -> dict[str, Any]:
    return {
        "elements": elements.count,
        "different": elements.num_different,
        "nan": elements.num_nan,
        "max_abs": _extreme_json(elements.max_abs),
        "max_rel": _extreme_json(elements.max_rel),
    }


def _extreme_json(extreme: Extreme | None) -> dict[str, Any] | None:
    if extreme is None:
        return None
    numbers = {"error": extreme.error, "a": extreme.a, "b": extreme.b}
    nodes = {key: encode_value(number, key) for key, number in numbers.items()}
    return {"index": extreme.index, **{key: node.get("value", node) for key, node in nodes.items()}}


# --- text -------------------------------------------------------------------------------------------------------------


def _lines(report: DiffReport) -> Iterator[str]:
    if report.differences:
        yield f"A  {printable(str(report.a))}"
        yield f"B  {printable(str(report.b))}"
        yield ""
        rows = [(difference, _row(difference)) for difference in report.differences]
        groups = group_names(rows, lambda row: row[0].path, lambda row: row[1])
        yield from table_lines(
            ("PATH", "DIFFERENCE", "A", "B", ""), [(group.name or "(root)", *group.items[0][1]) for group in groups]
        )
        yield ""
    if not is_quiet():
        yield from _summary(report)


def _row(difference: Difference) -> tuple[str, str, str, str]:
    """Return the cells of a row, but the first one."""
    elements = difference.elements
    if elements is None:
        return difference.kind, _fact_text(difference.a), _fact_text(difference.b), difference.reason
    numbers = ("", "") if elements.max_abs is None else (_number(elements.max_abs.a), _number(elements.max_abs.b))
    return difference.kind, *numbers, _elements_text(elements)


def _fact_text(fact: Fact) -> str:
    match fact:
        case None:
            return ""
        case TensorFacts():
            return f"{format_shape(fact.shape)} {fact.dtype}"
        case PlainValue():
            return format_value(json.loads(fact.node))
        case ContentDigest():
            return f"{fact.digest:016x}"
        case Layout():
            return (
                f"{format_layout(fact)} on {','.join(f'{axis}={size}' for axis, size in fact.mesh.axis_sizes.items())}"
            )
        case tuple():
            return format_shape(fact)
        case _:
            return str(fact)


def _elements_text(elements: ElementDifferences) -> str:
    texts = [f"{elements.num_different} of {format_count(elements.count, 'element')} differ"]
    if elements.max_abs is not None and elements.max_rel is not None:
        texts += [
            f"max abs error {_number(elements.max_abs.error)} at {_index(elements.max_abs)}",
            f"max rel error {_number(elements.max_rel.error)} at {_index(elements.max_rel)}",
        ]
    if elements.num_nan:
        texts.append(f"{elements.num_nan} with NaN")
    return ", ".join(texts)


def _index(extreme: Extreme) -> str:
    return f"[{', '.join(map(str, extreme.index))}]"


def _number(number: complex | float | int) -> str:
    # Enough digits to tell two float32 apart.
    return f"{number:.9g}" if not isinstance(number, int) else str(number)


def _summary(report: DiffReport) -> Iterator[str]:
    tensors, values = format_count(report.num_tensors, "tensor"), format_count(report.num_values, "value")
    read = f", {format_nbytes(report.nbytes)} read in {report.seconds:.1f} s" if report.nbytes else ""
    compared = f"{tensors} ({report.num_by_digest} by digest{read}) and {values} compared"
    counts = {kind: sum(each.kind is kind for each in report.differences) for kind in DifferenceKind}
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield f"{compared}: {found or 'all the same'}"
    if counts[DifferenceKind.ELEMENTS] and any(_is_by_digest(each) for each in report.differences):
        yield "digests tell that elements differ; --values reads them, and tells how many, and by how much"


def _is_by_digest(difference: Difference) -> bool:
    return difference.kind is DifferenceKind.ELEMENTS and difference.elements is None

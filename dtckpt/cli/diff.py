"""``dtckpt diff``: show the differences between two checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.options import (
    LOCATION,
    debug_option,
    json_option,
    memory_option,
    pager_option,
    parse_pairs,
    parse_size,
    quiet_option,
    return_freed_memory,
)
from dtckpt.cli.output import (
    format_count,
    format_layout,
    format_shape,
    format_value,
    is_quiet,
    open_progress,
    page,
    table_lines,
    write_event,
)
from dtckpt.errors import format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.inspecting.elements import ElementDifferences, Extreme
    from dtckpt.checkpoint.inspecting.tensor_comparison import Difference, DiffReport, Fact

DIFFERENCES = ("missing", "extra", "type", "value", "shape", "dtype", "layout", "part", "elements", "file", "unknown")
"""A copy of the names in `dtckpt.checkpoint.inspecting.tensor_comparison`, which is slow to import."""

EPILOG = """\b
Differences:
  missing, extra        in A only, in B only
  type, value           another kind of container or leaf; another plain value
  shape, dtype, layout  of a tensor; a layout is its specs and the axes of its mesh
  part                  which part of a tensor was saved
  elements              the tensor's elements
  file, unknown         not read, as files of other programs beside A or B; not compared

\b
Examples:
  dtckpt diff step_100 step_200                     by digests: which tensors differ
  dtckpt diff step_100 step_200 --values            how many elements differ, and by how much
  dtckpt diff step_100 step_100_for_8 --ignore layout
  dtckpt diff step_100 model.safetensors --select 'model/*' --rename 'model/*=*' --ignore layout

"""


@click.command("diff", epilog=EPILOG)
@click.argument("a", type=LOCATION)
@click.argument("b", type=LOCATION)
@click.option(
    "--values/--no-values",
    default=None,
    help="Read the elements of tensors whose digests differ, too; or read none at all [default: read those without "
    "digests that tell].",
)
@click.option("--select", multiple=True, metavar="GLOB", help="Compare only tensors and values of such names.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="Names in B for the names in A, as in convert; then --select chooses from A, and all of B is compared.",
)
@click.option(
    "--ignore", multiple=True, type=click.Choice(DIFFERENCES), help="Differences that do not count; see below."
)
@memory_option("256MiB")
@pager_option
@json_option("Print one JSON line per difference, then one with the result.")
@quiet_option
@debug_option
def command(
    *,
    a: str,
    b: str,
    values: bool | None,
    select: Sequence[str],
    renames: Sequence[str],
    ignore: Sequence[str],
    max_memory: str,
    pager: bool,
    as_json: bool,
) -> ExitCode:
    """Show the differences between checkpoints A and B; exit with 0 if there are none, with 1 if there are some.

    Content digests tell whether the elements of two tensors of one dtype differ, for all layouts and chunks.
    Elements are read where there are no such digests: of other libraries' files, and of two dtypes. Elements of one
    dtype are equal if their bits are, so a NaN equals one of the same bits. Errors do not count a NaN.
    """
    from dtckpt.checkpoint.inspecting.compare import plan_comparison
    from dtckpt.checkpoint.inspecting.tensor_comparison import DifferenceKind, Reads
    from dtckpt.checkpoint.open import open_checkpoint

    return_freed_memory()
    bound = parse_size(max_memory)
    new_names: dict[str | re.Pattern[str], str] = dict(parse_pairs(renames, "rename", "OLD=NEW").items())
    with open_checkpoint(a) as first, open_checkpoint(b) as second, ExitStack() as stack:
        comparison = plan_comparison(
            first,
            second,
            select=select,
            rename=new_names or None,
            reads={None: Reads.NEEDED, True: Reads.DIFFERENT, False: Reads.NONE}[values],
            ignore=frozenset(map(DifferenceKind, ignore)),
        )
        progress = None
        if comparison.nbytes:
            progress = stack.enter_context(open_progress("comparing", comparison.nbytes)).advance
        report = comparison.run(max_memory=bound, progress=progress)
    if as_json:
        _write_json(report)
    else:
        page(_lines(report), is_wanted=pager)
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
    from dtckpt.checkpoint.inspecting.tensor_comparison import ContentDigest, PlainValue, StoredDtype, TensorFacts
    from dtckpt.layout.layout import Layout

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
    from dtckpt.format.plain_values import encode_value

    numbers = {"error": extreme.error, "a": extreme.a, "b": extreme.b}
    nodes = {key: encode_value(number, key) for key, number in numbers.items()}
    return {"index": extreme.index, **{key: node.get("value", node) for key, node in nodes.items()}}


# --- text -------------------------------------------------------------------------------------------------------------


def _lines(report: DiffReport) -> Iterator[str]:
    from dtckpt.cli.name_groups import group_names

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
    from dtckpt.checkpoint.inspecting.tensor_comparison import ContentDigest, PlainValue, TensorFacts
    from dtckpt.layout.layout import Layout

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
    from dtckpt.checkpoint.inspecting.tensor_comparison import DifferenceKind

    tensors, values = format_count(report.num_tensors, "tensor"), format_count(report.num_values, "value")
    read = f", {format_nbytes(report.nbytes)} read in {report.seconds:.1f} s" if report.nbytes else ""
    compared = f"{tensors} ({report.num_by_digest} by digest{read}) and {values} compared"
    counts = {kind: sum(each.kind is kind for each in report.differences) for kind in DifferenceKind}
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield f"{compared}: {found or 'all the same'}"
    if any(each.kind is DifferenceKind.ELEMENTS and each.elements is None for each in report.differences):
        yield "digests tell that elements differ; --values reads them, and tells how many, and by how much"

"""The parts of a Hugging Face folder as parts of one tree, and the names of an optimizer's parameters; pure.

``Optimizer.state_dict()`` numbers the parameters in the order of its groups. `Trainer` has two groups, so the numbers
are not in the order of the model, and a safetensors file sorts its tensors. So only a file that lists the names tells
which parameter a moment belongs to: the optimizer's own ``param_names``, or a template from the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_fields import items, items_of
from dtckpt.checkpoint.foreign.pickle_syntax import STEP_NBYTES, Pairs, ReadBudget
from dtckpt.checkpoint.foreign.pickled_tensors import is_tensor, tensor_view
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, capped
from dtckpt.format import tree as trees
from dtckpt.format.hash_work import validate_hashes

Shape = tuple[int, ...]
MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""State that has the shape of its parameter."""


def placed(index: PieceIndex, path: Sequence[str], folder: str = "") -> PieceIndex:
    """Return an index as a part of a larger one.

    Args:
        index: The index.
        path: The path of its tree in the larger tree. If the last key is the only key of the tree, too, the tree stands
            without that key.
        folder: The folder of its files below the larger one's; none: the same folder.
    """
    structure, inner = index.structure, ""
    if path and (top := trees.dict_of(structure)) is not None and [key for key, _ in top["dict"]] == [path[-1]]:
        structure, inner = top["dict"][0][1], f"{path[-1]}/"
    prefix = "".join(f"{key}/" for key in path)

    def at(name: str) -> str:
        # A file that holds one tensor names it itself.
        return prefix.removesuffix("/") if structure == {"tensor": name} else prefix + name.removeprefix(inner)

    def beside(file: str) -> str:
        return f"{folder}/{file}" if folder else file

    names = {name: at(name) for name in index.tensors}
    tensors = {names[name]: _moved(tensor, names[name], folder) for name, tensor in index.tensors.items()}
    return PieceIndex(
        index.kind,
        tensors,
        trees.relabel(structure, names),
        {at(name): error for name, error in index.refused.items()},
        tuple(map(beside, index.files)),
        tuple(map(beside, index.unread)),
        tuple(f"{prefix}{note}" for note in index.notes),
    )


def _moved(tensor: PieceTensor, name: str, folder: str) -> PieceTensor:
    if not folder:
        return replace(tensor, name=name)
    pieces = tuple(replace(piece, file=f"{folder}/{piece.file}") for piece in tensor.pieces)
    return replace(tensor, name=name, pieces=pieces)


def with_names(
    value: Any, template: Mapping[str, Shape] | None, where: str, budget: ReadBudget
) -> tuple[Any, dict[str, Any]]:
    """Return an optimizer's state with names of the parameters in place of numbers, as far as a file tells them.

    Args:
        value: The pickled state.
        template: Names and shapes of the parameters, in the order of the optimizer; None: ``param_names`` of the groups
            count, if they have them.
        where: The file, for messages.
        budget: Bounds the names.

    Returns:
        The state; and by number the state of the parameters that have no names.

    Raises:
        CheckpointCorruptError: The file is malformed, or the template is of another optimizer.
    """
    fields = items_of(value, where, budget)
    if not {"state", "param_groups"} <= fields.keys() or type(fields["param_groups"]) is not list:
        return value, {}
    groups = [items_of(group, where, budget) for group in fields["param_groups"]]
    # Before they are joined: many groups may refer to one list.
    budget.take(STEP_NBYTES * sum(len(_listed(group, key)) for group in groups for key in ("params", "param_names")))
    numbers = [number for group in groups for number in _listed(group, "params")]
    try:
        pairs = items(fields["state"])
    except TypeError as error:
        raise CheckpointCorruptError(f"{where} holds no state by parameter") from error
    keys = [number for number, _ in pairs]
    if any(type(number) is not int for number in [*numbers, *keys]):
        return value, {}  # names, as FSDP gathers the state
    validate_hashes(numbers)
    validate_hashes(keys)
    state = dict(pairs)
    own = [name for group in groups for name in _listed(group, "param_names") if type(name) is str]
    given = own if template is None else list(template)
    names = dict(zip(numbers, given, strict=False))
    if template is not None:
        _validate_template(template, numbers, state, names, where)
    if not (given and len(given) == len(set(given)) == len(names) == len(numbers) and state.keys() <= names.keys()):
        return value, {str(number): each for number, each in state.items()}
    for group in groups:
        group["params"] = [names[number] for number in _listed(group, "params")]
    fields["state"] = Pairs((names[number], each) for number, each in state.items())
    fields["param_groups"] = [Pairs(group.items()) for group in groups]
    return Pairs(fields.items()), {}


def _listed(group: Mapping[str, Any], key: str) -> list[Any]:
    listed = group.get(key)
    return listed if type(listed) is list else []


def _validate_template(
    template: Mapping[str, Shape],
    numbers: Sequence[int],
    state: Mapping[int, Any],
    names: Mapping[int, str],
    where: str,
) -> None:
    """Check that a template may be of an optimizer: as many parameters, and moments of their shapes."""
    if len(template) != len(numbers):
        raise CheckpointCorruptError(
            f"the template has {len(template)} parameters, and {where} has {len(numbers)}; is it of another optimizer?"
        )
    for number, each in state.items():
        own = items(each) if type(each) is Pairs else Pairs()
        for kind, value in own:
            if kind not in MOMENTS or not is_tensor(value):
                continue
            shape = tensor_view(value, f"{where}: {kind} of {number}").shape
            if number in names and shape != template[names[number]]:
                raise CheckpointCorruptError(
                    f"the template says that parameter {number} of {where} is {names[number][:200]!r} of shape "
                    f"{template[names[number]]}, and its {kind} has shape {shape}; list the parameters in the order of "
                    "the optimizer's groups"
                )


def note_of_numbers(path: str, numbered: Mapping[str, Any]) -> str:
    """Return the note about an optimizer without names.

    Args:
        path: Its path in the tree.
        numbered: By number, the state of its parameters.
    """
    return (
        f"{path}/state: no file tells the names of the parameters {capped(numbered, 3)}, which have numbers in the "
        "order of the optimizer's groups; put template.json beside the files, with {name: list(p.shape)} in that order"
    )

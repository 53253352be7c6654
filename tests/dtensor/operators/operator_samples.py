"""PyTorch's OpInfo database of operators, and the samples of it that the tests try."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

SEED = 11
MAX_LOOKED_AT = 120
"""Samples of an operator among which those to try are chosen; some operators have thousands."""
MAX_ELEMENTS = 20_000
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
"""An operator is tried with the first one that it takes."""
UNDETERMINED = frozenset(
    {
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "empty",
        "empty_strided",
        "empty_permuted",
        "resize_",
        "resize_as_",
    }
)
"""Operators whose result has elements that nothing sets."""

NOT_TRIED = {
    name: reason
    for reason, names in {
        "takes no tensor": """
            arange broadcast_shapes empty empty_permuted empty_strided eye full linspace logspace ones randint randn
            scalar_tensor signal_windows_bartlett signal_windows_blackman signal_windows_cosine
            signal_windows_exponential signal_windows_gaussian signal_windows_general_cosine
            signal_windows_general_hamming signal_windows_hamming signal_windows_hann signal_windows_kaiser
            signal_windows_nuttall tril_indices triu_indices zeros
        """,
        "takes sparse tensors": "sparse_mm_reduce sparse_sampled_addmm",
        "runs on CUDA only": """
            jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref
            jiterator_unary nn_functional_batch_norm_without_cudnn torch__scaled_mm torch__scaled_mm_v2
            torch_ops_aten__efficient_attention_forward torch_ops_aten__flash_attention_forward
        """,
    }.items()
    for name in names.split()
}
"""Operators of the database that are left out, and why."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator: its arguments, as plain tensors."""

    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]
    """The first argument, the other arguments, keyword arguments."""
    finish: Callable[[Any], Any] = field(repr=False)
    """Makes of the results what has one gradient only, where the results themselves are free in sign or phase."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, torch.Tensor)]

    def with_tensors(self, make: Callable[[torch.Tensor, int], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``make(tensor, position)`` in place of every tensor."""
        position = itertools.count()
        return tree_map(
            lambda leaf: make(leaf, next(position)) if isinstance(leaf, torch.Tensor) else leaf, self.arguments
        )


@cache
def operators() -> dict[str, Any]:
    """Return the operators to try, by name."""
    return {op.formatted_name: op for op in op_db if op.formatted_name not in NOT_TRIED}


def dtype_of(op: Any) -> torch.dtype | None:
    """Return the dtype that an operator is tried with; None if it does not run on a CPU."""
    supported = op.supported_dtypes("cpu")
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def samples_of(op: Any, count: int) -> list[Sample]:
    """Return up to ``count`` samples: as many kinds of calls as there are, then any."""
    found = list(itertools.islice(_samples(op), MAX_LOOKED_AT))
    by_kind: dict[Any, list[Sample]] = {}
    for sample in found:
        by_kind.setdefault(_kind(sample), []).append(sample)
    firsts = [group[0] for group in by_kind.values()]
    if len(firsts) > count:
        step = (len(firsts) - 1) / (count - 1) if count > 1 else 0
        return [firsts[round(index * step)] for index in range(count)]
    rest = [sample for group in itertools.zip_longest(*by_kind.values()) for sample in group if sample is not None]
    return rest[:count]


def _samples(op: Any) -> Iterator[Sample]:
    seed_everything(SEED)
    dtype = dtype_of(op)
    differentiable = bool(op.supports_autograd and dtype is not None and (dtype.is_floating_point or dtype.is_complex))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in op.sample_inputs("cpu", dtype, requires_grad=differentiable):
            sample = Sample((each.input, tuple(each.args), dict(each.kwargs)), each.output_process_fn_grad)
            tensors = sample.tensors
            is_dense = all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors)
            if tensors and is_dense and sum(tensor.numel() for tensor in tensors) <= MAX_ELEMENTS:
                # A DTensor has no strides: an operator that reads strides must see the strides of a contiguous tensor.
                yield Sample(sample.with_tensors(_contiguous), sample.finish)


def _contiguous(tensor: torch.Tensor, _: int) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def _kind(sample: Sample) -> Any:
    """Return what makes a sample unlike another: names of options, types, ranks, and whether there are elements."""
    return (
        tuple(sample.arguments[2]),
        tuple(
            (leaf.ndim, leaf.dtype, leaf.numel() == 0) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in tree_leaves(sample.arguments)
        ),
    )


def seed_everything(seed: int = common_utils.SEED) -> None:
    """Seed all generators of the CPU; ``torch.manual_seed`` formats three tracebacks for the other devices."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# The database seeds before every sample, and looks for a test case in the source of all frames of the stack.
common_utils.set_rng_seed = seed_everything
common_utils.extract_test_fn = lambda: None

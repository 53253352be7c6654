"""Draw a random program from a seed: rows of the grammar, filled with variables of fitting shapes and dtypes.

The drawer runs each statement on plain tensors at once, so it knows the shapes and values that the next one finds.
"""

from __future__ import annotations

import contextlib
import math
import random

import torch

from .grammar import FAMILIES, SHARES, Row
from .program import Program, Statement
from .runner import TOLERANCES, are_equal, execute, namespace, tensors_of
from .variables import FLOATS, MAX_NUMEL, OTHERS, Unfit, kind_of
from .words import Words

MESHES: tuple[dict[str, int], ...] = (
    {"x": 1}, {"x": 2}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 4}, {"x": 5}, {"x": 6}, {"x": 7}, {"x": 8},
    {"x": 2, "y": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 3, "y": 2}, {"x": 1, "y": 2}, {"x": 4, "y": 2},
    {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 1, "z": 2},
)  # fmt: skip
LARGEST_EXACT = {torch.bfloat16: 2**7, torch.float16: 2**9, torch.float32: 2**20, torch.complex64: 2**20}
"""Up to which numbers programs that are exact go, where sums of some of them must be exact, too; else 2**30."""
LARGEST_PRODUCT = 2**10
"""The same for products of many numbers: a larger one may be a multiple of 1/1024 only because it was rounded."""
_GIVEN = frozenset(namespace()) | {"__builtins__"}


class Drawer(Words):
    """Draws one program.

    Args:
        seed: Decides everything.
        num_clients: The number of devices is a multiple of it.
    """

    def __init__(self, seed: int, num_clients: int = 1) -> None:
        rng = random.Random(seed)
        super().__init__(rng, rng.choice([axes for axes in MESHES if math.prod(axes.values()) % num_clients == 0]))
        self.seed, self.looks = seed, rng.random() < 0.6
        self.statements: list[Statement] = []

    def program(self) -> Program:
        rng = self.rng
        self.first_input()
        wanted = rng.randint(3, 10)
        for _ in range(6 * wanted):
            if len(self.statements) >= wanted:
                break
            (family,) = rng.choices(list(SHARES), list(SHARES.values()))
            self.statement(rng.choice(FAMILIES[family]))
        self.end()
        return self.result()

    def first_input(self) -> None:
        while not self.inputs:
            # A shape may have too many elements.
            with contextlib.suppress(Unfit):
                self.input(self.random_shape(), self.rng.choice(FLOATS if self.rng.random() < 0.7 else OTHERS))

    def result(self) -> Program:
        axes = tuple(self.axes.items())
        return Program(self.seed, axes, tuple(self.inputs), tuple(self.statements), self.is_exact, self.looks)

    def statement(self, row: Row) -> bool:
        """Add a statement if the row fits some variable; return whether it does and runs on plain tensors."""
        if row.numbers and row.numbers != ("exact" if self.is_exact else "close"):
            return False
        num_inputs = len(self.inputs)
        try:
            source = self.fill(row)
        except Unfit:
            self._forget(num_inputs)
            return False
        writes = row.writes or ".backward" in source or "_(" in source
        if row.writes and ".data" in source and any(each.requires_grad for each in tensors_of(self.variables).values()):
            self._forget(num_inputs)  # the gradients of what has been saved mean nothing then
            return False
        if row.writes and self.rng.random() < 0.15:
            source = f"with torch.no_grad(): {source}"
        if not self.is_exact and not self._is_stable(source):
            self._forget(num_inputs)
            return False
        before = tensors_of(self.variables)
        shapes = {name: each.shape for name, each in before.items()}
        error = execute(source, self.variables)
        after = tensors_of(self.variables)
        if "out=" in source and any(each.shape != shapes[name] for name, each in after.items()):
            is_fit = False  # docs/departures.md: `out` keeps its shape
        elif error is not None:
            is_fit = self.rng.random() < 0.05
        else:
            most = LARGEST_PRODUCT if self.is_exact and "prod(" in source else math.inf
            is_fit = all(self._is_fit(each, most) for name, each in after.items() if writes or name not in before)
        if is_fit:
            self.statements.append(Statement(source, row.template))
        elif writes:
            self._start_again(num_inputs)
        else:
            self.variables = {name: each for name, each in self.variables.items() if name in before or name in _GIVEN}
            self._forget(num_inputs)
        return is_fit and error is None

    def _is_stable(self, source: str) -> bool:
        """Whether the last digits of the operands hardly matter, as they do to ``log1p`` of numbers close to -1."""
        results = []
        for share in (0, 1):
            variables = self.variables | {
                name: _moved(each.detach().clone(), share) for name, each in tensors_of(self.variables).items()
            }
            if execute(source, variables) is not None:
                return True  # whether such statements are taken is another question
            results.append(tensors_of(variables))
        return all(
            are_equal(results[1][name], each.detach(), TOLERANCES.get(each.dtype, 0.0) / 4)
            for name, each in results[0].items()
        )

    def _add(self, source: str, row: str) -> None:
        """Add a statement unless its numbers are not fit; errors stay."""
        execute(source, self.variables)
        if all(map(self._is_fit, tensors_of(self.variables).values())):
            self.statements.append(Statement(source, row))
        else:
            self._start_again(len(self.inputs))

    def _forget(self, kept: int) -> None:
        """Forget the inputs that a statement wanted that is not taken."""
        for each in self.inputs[kept:]:
            self.variables.pop(each.name, None)
        del self.inputs[kept:]

    def _start_again(self, kept: int) -> None:
        """Go back to before a statement that has written; the statements before it run again."""
        del self.inputs[kept:]
        self.variables = namespace() | {each.name: each.plain() for each in self.inputs}
        for statement in self.statements:
            execute(statement.source, self.variables)

    def _is_fit(self, each: torch.Tensor, most: float = math.inf) -> bool:
        """Whether numbers are finite and at most so large, exact if they should be, and not too many."""
        try:
            each.grad_fn  # noqa: B018  (PyTorch asserts here after some changes of `data`)
        except RuntimeError:
            return False
        if each.layout != torch.strided or each.numel() > MAX_NUMEL or each.ndim > 6:
            return False
        if each.dtype == torch.bool or not each.numel():
            return True
        values = each.detach().resolve_conj()
        values = torch.view_as_real(values) if values.is_complex() else values
        if not values.dtype.is_floating_point:
            return int(values.max()) <= 2**30
        most = min(most, LARGEST_EXACT.get(each.dtype, 2**30) if self.is_exact else 1e4)
        if not float(values.abs().max()) <= most:
            return False
        return not self.is_exact or bool((values.double() * 1024 % 1 == 0).all())

    def end(self) -> None:
        """Take the gradients, then write to each variable, so that whatever shares memory shows."""
        self.take_gradients()
        for number, (name, each) in enumerate(tensors_of(self.variables).items()):
            kind = kind_of(each.dtype)
            target = f"{name}.data" if self.rng.random() < 0.3 else f"{name}.detach()"
            write = "logical_not_()" if kind == "b" else f"add_({2**number})" if self.is_exact else f"fill_({number})"
            self._add(f"{target}.{write}", "write at the end")

    def take_gradients(self) -> None:
        """Take the gradients of all leaves, from all variables that have some."""
        live = tensors_of(self.variables)
        leaves = [name for name, each in live.items() if each.requires_grad and each.is_leaf]
        roots = [name for name, each in live.items() if each.requires_grad and not each.is_leaf]
        if leaves and roots:
            options = "retain_graph=True, allow_unused=True, materialize_grads=True"
            gradients = ", ".join(f"grad_{name}" for name in leaves)
            source = f"{gradients}, = torch.autograd.grad(loss({', '.join(roots)}), [{', '.join(leaves)}], {options})"
            self._add(source, "gradients at the end")


def _moved(tensor: torch.Tensor, share: int) -> torch.Tensor:
    """Return a tensor whose numbers are units of the last place larger or smaller, if they are no integers."""
    if tensor.dtype not in TOLERANCES:
        return tensor
    signs = torch.arange(tensor.numel()).reshape(tensor.shape) % 3 - 1
    return tensor + tensor * signs * (share * torch.finfo(tensor.dtype).eps)


def draw(seed: int, num_clients: int = 1) -> Program:
    """Return the program of a seed."""
    return Drawer(seed, num_clients).program()

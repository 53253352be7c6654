"""The words of templates (see ``grammar.toml``), and what stands for them in a statement."""

from __future__ import annotations

import math
import random
import re

import torch

from .grammar import COPIES, Row
from .runner import tensors_of
from .variables import FLOATS, KINDS, OTHERS, Unfit, Variables, kind_of

_UNCHECKED = ("out={x}", "{x}.tril_", "{x}.triu_", "{x}.median({dim}", "{x}.nanmedian({dim}")
"""Of tensors of which one place in memory is several elements: writes that PyTorch does not always refuse, and medians,
for which it returns uninitialized memory."""


_CUTS = ("log", "sqrt", "acos", "asin", "atan", "pow", "**", "angle")
"""Functions of complex numbers that jump at a half axis."""


class Words(Variables):
    """Fills templates."""

    def __init__(self, rng: random.Random, axes: dict[str, int]) -> None:
        super().__init__(rng, axes)
        self.num_made = 0
        self.words: dict[str, str] = {}
        self.x: torch.Tensor = torch.zeros(())

    def fill(self, row: Row) -> str:
        """Return the statement of a row, with its words drawn."""
        name = self._variable_for(row)
        self.x, self.words = self.variables[name], {"x": name}
        return re.sub(r"\{(\w+)\}", lambda found: self._word(found[1]), row.statement)

    def _is_base_or_view(self, tensor: torch.Tensor) -> bool:
        return tensor._is_view() or any(each._base is tensor for each in tensors_of(self.variables).values())

    def _variable_for(self, row: Row) -> str:
        """Return a variable for x, or a new input."""
        kind = self.rng.choice(row.kinds)
        try:
            return self.variable(
                lambda each: (
                    kind_of(each.dtype) == kind
                    and str(each.ndim) in row.ranks
                    # Some operators of PyTorch write to one place several times, and it keeps any of the values.
                    and not (any(text in row.statement for text in _UNCHECKED) and _is_expanded(each))
                    # Sums of terms lose the signs of zeros, on which the side of a branch cut depends.
                    and not (self.can_be_pending and each.is_complex() and any(cut in row.statement for cut in _CUTS))
                    # PyTorch writes to the source: it takes the result for an `out` of another shape.
                    and not ("{x}.squeeze_({dim}" in row.statement and each.is_neg())
                    # The mean of no numbers is whatever was in memory.
                    and not ("margin_loss" in row.statement and not each.numel())
                    # Autograd would go on to take the view for a part of its base.
                    and not (row.statement.startswith("{x}.data = ") and self._is_base_or_view(each))
                )
            )
        except Unfit:
            if self.rng.random() < 0.5:
                raise
        return self.input_for(row)

    def input_for(self, row: Row) -> str:
        kind, ranks = self.rng.choice(row.kinds), row.ranks
        names = [name for name in FLOATS + OTHERS if KINDS.get(name, "i") == kind]
        if kind == "f" and not self.is_exact:
            names.append("bfloat16")
        rank = int(self.rng.choice(ranks))
        shape = self.random_shape()
        while len(shape) < rank:
            shape = (*shape, self.rng.choice([1, 2, 3]))
        return self.input(shape[:rank], self.rng.choice(names))

    def _word(self, word: str) -> str:
        if word not in self.words:
            self.words[word] = str(getattr(self, f"_draw_{word if word == 'dim2' else word.rstrip('2')}")())
        return self.words[word]

    @property
    def size(self) -> int:
        """Size of x along the dim that is drawn."""
        return self.x.shape[int(self._word("dim"))] if self.x.ndim else 1

    def _with_size(self, size: int) -> tuple[int, ...]:
        """Return the shape of x with another size along the dim."""
        shape = list(self.x.shape)
        if shape:
            shape[int(self._word("dim"))] = size
        return tuple(shape)

    def _draw_new(self) -> str:
        self.num_made += 1
        return f"v{self.num_made}"

    def _draw_other(self) -> str:
        return self.variable(lambda each: True)

    def _draw_leaf(self) -> str:
        return self.variable(lambda each: each.is_leaf and each.requires_grad)

    def _draw_like(self) -> str:
        rng, shape = self.rng, tuple(self.x.shape)
        lead = rng.choice([0, 0, 0, rng.randint(0, len(shape))])
        wanted = tuple(1 if rng.random() < 0.15 else size for size in shape[lead:])
        dtype = None if rng.random() < 0.85 else rng.choice(FLOATS + OTHERS)
        return self.of_shape(wanted, dtype)

    def _draw_plain(self) -> str:
        """A plain tensor that is dense, transposed, sliced with steps, or expanded."""
        rng, rank = self.rng, self.x.ndim
        shape = [1 if rng.random() < 0.15 else size for size in self.x.shape]
        order = rng.sample(range(rank), rank)
        stored = [shape[dim] for dim in order]
        way = rng.choice(["dense", "dense", "stepped", "expanded"])
        if way == "stepped" and rank:
            stored[-1] *= 2
        elif way == "expanded" and rank:
            stored[rng.randrange(rank)] = 1
        values = f"torch.arange({math.prod(stored)}).reshape({tuple(stored)}) % 4"
        values = f"({values}).to({self.x.dtype})"
        if way == "stepped" and rank:
            values += "[..., ::2]"
        return f"{values}.permute({[order.index(dim) for dim in range(rank)]}).expand({tuple(shape)})"

    def _draw_same(self) -> str:
        return self.of_shape(tuple(self.x.shape))

    def _draw_mask(self) -> str:
        shape = tuple(self.x.shape)
        return self.of_shape(tuple(1 if self.rng.random() < 0.2 else size for size in shape), "bool")

    def _draw_mask_full(self) -> str:
        return self.of_shape(tuple(self.x.shape)[: self.rng.randint(1, self.x.ndim)], "bool")

    def _draw_num(self) -> str:
        kind = kind_of(self.x.dtype)
        if kind == "b":
            return self.rng.choice(["True", "2", "0"])
        if kind == "i" and self.rng.random() < 0.8:
            return str(self.rng.choice([2, 3, 1, 0]))
        return str(self.rng.choice([2, 2.0, 0.5, -1, -2.0, 3, 0.25, 0]))

    def _draw_n(self) -> int:
        return self.rng.choice([1, 2, 2, 3])

    def _draw_keep(self) -> bool:
        return self.rng.random() < 0.4

    def _draw_dim(self) -> int:
        return self.rng.randint(-max(self.x.ndim, 1), max(self.x.ndim, 1) - 1)

    def _draw_dim2(self) -> int:
        """Return another dim, if there is one."""
        others = [dim for dim in range(self.x.ndim) if dim != int(self._word("dim")) % self.x.ndim]
        return self.rng.choice(others or [0])

    def _draw_newdim(self) -> int:
        return self.rng.randint(-self.x.ndim - 1, self.x.ndim)

    def _draw_dims(self) -> tuple[int, ...]:
        ndim = self.x.ndim
        chosen = self.rng.sample(range(ndim), self.rng.randint(1, ndim)) if ndim else []
        return tuple(dim - ndim if self.rng.random() < 0.3 else dim for dim in chosen)

    def _draw_perm(self) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(self.x.ndim), self.x.ndim))

    def _draw_perm_all(self) -> tuple[list[int], list[int]]:
        return list(range(self.x.ndim)), list(range(self.x.ndim))

    def _draw_offset(self) -> int:
        return self.rng.choice([0, 0, 1, -1])

    def _draw_start(self) -> int:
        return self.rng.randint(0, self.size)

    def _draw_length(self) -> int:
        return self.rng.randint(0, self.size - int(self._word("start")))

    def _draw_stop(self) -> int:
        return self.rng.randint(int(self._word("start")), self.size)

    def _draw_at(self) -> int:
        return self.rng.randint(-self.size, self.size - 1) if self.size else 0

    def _draw_part(self) -> int:
        return self.rng.choice([0, 0, 1, -1])

    def _draw_kth(self) -> int:
        return self.rng.randint(0, self.size)

    def _draw_window(self) -> int:
        return self.rng.randint(1, max(1, self.size))

    def _draw_sizes(self) -> list[int]:
        first = self.rng.randint(0, self.size)
        return [first, self.size - first]

    def _draw_pad(self) -> int:
        return self.rng.choice([0, 1, 2, -1])

    def _draw_factors(self) -> tuple[int, ...]:
        return self._factors(self.size)

    def _factors(self, numel: int) -> tuple[int, ...]:
        found: list[int] = []
        while numel > 1 and len(found) < 3:
            found.append(self.rng.choice([each for each in range(1, numel + 1) if numel % each == 0]))
            numel //= found[-1]
        return (*found, numel)

    def _draw_shape(self) -> tuple[int, ...]:
        found = list(self._factors(self.x.numel()))
        if self.x.numel() and self.rng.random() < 0.2:
            found[self.rng.randrange(len(found))] = -1
        return tuple(found)

    def _draw_expanded(self) -> tuple[int, ...]:
        sizes = [self.rng.choice([1, 2, 3]) if size == 1 else size for size in self.x.shape]
        return (*([2] if self.rng.random() < 0.4 else []), *sizes)

    def _draw_reduced(self) -> tuple[int, ...]:
        return tuple(1 if self.rng.random() < 0.5 else size for size in self.x.shape)

    def _draw_repeats(self) -> tuple[int, ...]:
        return tuple(self.rng.choice([1, 1, 2, 0]) for _ in range(self.x.ndim + self.rng.choice([0, 0, 1])))

    def _draw_strided(self) -> str:
        rows = self.rng.randint(1, 3)
        return f"({rows}, 2), ({self.rng.choice([1, 2, 3])}, {self.rng.choice([1, 2])})"

    def _draw_copied(self) -> str:
        copied = self.rng.choice(COPIES)
        return re.sub(r"\{(\w+)\}", lambda found: self._word(found[1]), copied)

    def _draw_placed(self) -> str:
        dims = [None, *range(self.x.ndim)]
        return ", ".join(str(self.rng.choice(dims)) for _ in self.axes)

    def _draw_key(self) -> str:
        """Ints, slices, None and the Ellipsis."""
        parts, rng = [], self.rng
        for size in self.x.shape[: rng.randint(0, self.x.ndim)]:
            way = rng.random()
            if way < 0.3 and size:
                parts.append(str(rng.randint(-size, size - 1)))
            elif way < 0.7:
                bounds = [rng.choice(["", str(rng.randint(-size, size))]) for _ in range(2)]
                parts.append(f"{bounds[0]}:{bounds[1]}{rng.choice(['', '', ':2', ':3'])}")
            elif way < 0.9:
                parts.append(":")
            else:
                parts += ["None", ":"]
        if rng.random() < 0.2:
            parts.append("...")
        return ", ".join(parts) or "..."

    def _draw_fancy(self) -> str:
        parts, rng, has_index = [], self.rng, False
        for size in self.x.shape:
            if size and (not has_index or rng.random() < 0.3) and rng.random() < 0.6:
                parts.append(self.of_indices((2,), size, repeats=False) if size > 1 else self.of_indices((1,), 1))
                has_index = True
                continue
            parts.append(rng.choice([":", ":", "0:1", "::2"]))
        return ", ".join(parts)

    def _draw_index(self) -> str:
        return self.of_indices((self.rng.randint(0, self.size),), self.size, repeats=False)

    def _draw_indexed(self) -> str:
        return self.of_shape(self._with_size(self.variables[self._word("index")].numel()))

    def _draw_repeated(self) -> str:
        self.words.setdefault("dim", "0")
        return self.of_indices((self.rng.randint(1, 4),), self.size, is_negative=False)

    def _draw_repeated_first(self) -> str:
        return self.of_indices((3,), self.x.shape[0])

    def _draw_repeated_all(self) -> str:
        return self.of_indices((self.rng.randint(1, 4),), self.x.numel())

    def _draw_index_like(self) -> str:
        size = self.size
        return self.of_indices(self.x.shape, size, is_negative=False)

    def _draw_index_once(self) -> str:
        return self.of_indices(self._with_size(1), self.size, is_negative=False)

    def _draw_selected(self) -> str:
        shape = list(self.x.shape)
        del shape[int(self._word("dim"))]
        return self.of_shape(shape)

    def _draw_sliced(self) -> str:
        start = int(self._word("start"))
        return self.of_shape(self._with_size(int(self._word("stop")) - start))

    def _draw_first(self) -> str:
        return self.of_shape(self._with_size(int(self._word("start"))))

    def _draw_rest(self) -> str:
        return self.of_shape(self._with_size(self.size - int(self._word("start"))))

    def _draw_stacked(self) -> str:
        return self.of_shape((2, *self.x.shape))

    def _draw_summed(self) -> str:
        shape = list(self.x.shape)
        del shape[int(self._word("dim"))]
        return self.of_shape(shape)

    def _draw_square(self) -> str:
        return self.of_shape((self.x.shape[1], self.x.shape[1]))

    def _draw_token(self) -> str:
        return self.of_indices((2, 3), self.x.shape[0], is_negative=False)

    def _draw_label(self) -> str:
        return self.of_indices((self.x.shape[0],), self.x.shape[1], is_negative=False)

    def _draw_dtype(self) -> str:
        return "torch." + self.rng.choice(
            ["float64", "float32", "int64", "complex128", "bool", "int32"]
            if self.is_exact
            else ["float64", "float32", "bfloat16"]
        )

    def _draw_float(self) -> str:
        return "torch." + self.rng.choice(["float64", "float32"])

    def _draw_bits(self) -> str:
        return (
            {8: "torch.int64", 4: "torch.int32", 2: "torch.int16"}.get(self.x.itemsize, "torch.int8")
            if self.rng.random() < 0.7
            else "torch.int32"
        )

    # --- operands of products and layers --------------------------------------------------------------------------

    def _width(self) -> int:
        return self.rng.choice([1, 2, 3, 4])

    def _draw_cols(self) -> str:
        return self.of_shape((self.x.shape[-1], self._width()))

    def _draw_rows(self) -> str:
        return self.of_shape((self._width(), self.x.shape[-1]))

    def _draw_vector(self) -> str:
        return self.of_shape((self.x.shape[-1],))

    def _draw_single(self) -> str:
        return self.of_shape((1,))

    def _draw_batch(self) -> str:
        return self.of_shape((self.x.shape[0], self.x.shape[-1], self._width()))

    def _draw_bias(self) -> str:
        for word in ("rows", "cols", "batch"):
            if word in self.words:
                shape = self.variables[self.words[word]].shape
                return self.of_shape((shape[0] if word == "rows" else shape[-1],))
        return self.of_shape((1,))

    def _draw_cross(self) -> str:
        return self.of_shape((2, 3))

    def _draw_pairs(self) -> str:
        return self.of_shape((*self.x.shape[:2], 2))

    def _draw_last(self) -> list[int]:
        return [self.x.shape[-1]]

    def _draw_spd(self) -> str:
        x = self._word("x")
        # The multiple of the identity grows with the matrix: otherwise rounding errors are all that the result has.
        multiple = f"(4 + {x}.detach().abs().square().sum())"
        return f"({x} @ {x}.mT + {multiple} * torch.eye({self.x.shape[-2]}, dtype={x}.dtype))"

    def _draw_kernel(self) -> str:
        return self.of_shape((2, self.x.shape[1], 2))

    def _draw_patch(self) -> str:
        return self.of_shape((2, self.x.shape[1], 2, 2))


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether some dim has one place in memory for several elements."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))

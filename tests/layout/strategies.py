"""Hypothesis strategies for meshes and layouts."""

import string

from hypothesis import strategies as st

from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import RESERVED_NAMES, Mesh
from dtckpt.layout.placement import REDUCE_OPS

names = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="|,=*+"), min_size=1, max_size=5
).filter(lambda name: name not in RESERVED_NAMES)
mesh_names = st.text(string.ascii_letters + string.digits + "_-:=,*+é", max_size=5)


@st.composite
def meshes(draw, max_axes: int = 3, min_size: int = 1) -> Mesh:
    axes = draw(st.lists(names, min_size=1, max_size=max_axes, unique=True))
    return abstract_mesh({axis: draw(st.integers(min_size, 3)) for axis in axes}, draw(mesh_names))


@st.composite
def layouts(draw, min_size: int = 1) -> Layout:
    """Layouts of rank up to 3: axes in any order over dims, reductions and nothing."""
    mesh = draw(meshes(min_size=min_size))
    rank = draw(st.integers(0, 3))
    by_dim: list[list[str]] = [[] for _ in range(rank)]
    partial: dict[str, str] = {}
    for axis in draw(st.permutations(mesh.dim_names)):
        use = draw(st.integers(-2, rank - 1))
        if use >= 0:
            by_dim[use].append(axis)
        elif use == -2:
            partial[axis] = draw(st.sampled_from(REDUCE_OPS))
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh, partial)

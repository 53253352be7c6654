import pytest

from dtckpt.checkpoint.restoring.state_layouts import spans_in_order

A, B, C = (6,), (9, 6), (9,)


@pytest.mark.parametrize(
    ("wanted", "shapes", "spans"),
    [
        ([], [A], []),
        ([{A}, {B}], [A, B], [(0, 0), (1, 1)]),
        ([{A}, {A}, {B}, {A}], [A, A, B, C, A], [(0, 0), (1, 1), (2, 2), (4, 4)]),
        ([{A}, {B}], [A, A, B], [(0, 1), (2, 2)]),
        ([{B}], [A, B, A, B, A], [(1, 3)]),
        ([{A, C}, {B}], [C, B], [(0, 0), (1, 1)]),
        ([{B}, {A}], [A, B], []),
        ([{A}, {A}], [A], []),
    ],
)
def test_positions_in_order(wanted, shapes, spans):
    assert spans_in_order(wanted, shapes) == spans

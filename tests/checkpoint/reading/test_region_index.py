import itertools
import random

import pytest

from dtckpt.checkpoint.reading import pieces
from dtckpt.checkpoint.reading.pieces import FEW, RegionIndex
from dtckpt.layout.region import Region


def _random_regions(rng, count, ndim):
    return [
        Region(
            tuple(rng.randrange(12) for _ in range(ndim)),
            tuple(rng.randint(1, rng.choice([1, 2, 8])) for _ in range(ndim)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("compared", [1, 7, 1 << 20])
@pytest.mark.parametrize("ndim", range(4))
def test_it_finds_what_comparing_each_with_each_finds(ndim, compared, monkeypatch):
    monkeypatch.setattr(pieces, "_COMPARED", compared)
    rng = random.Random(ndim)
    for _ in range(300):
        regions = _random_regions(rng, rng.randint(0, 3 * FEW), ndim)
        index = RegionIndex(regions)
        for region in _random_regions(rng, 5, ndim):
            assert index.meeting(region) == [
                position for position, each in enumerate(regions) if each.intersect(region) is not None
            ]
        clash = index.clash()
        pairs = [
            {one, other}
            for one, other in itertools.combinations(range(len(regions)), 2)
            if regions[one].intersect(regions[other]) is not None
        ]
        assert set(clash) in pairs if pairs else clash is None


@pytest.mark.parametrize("sizes", [(300, 200), (40, 40, 40), (60_000, 1), (1, 60_000)], ids=str)
def test_a_grid_is_not_compared_in_pairs(sizes, monkeypatch):
    cells = itertools.product(*map(range, sizes))
    index = RegionIndex([Region(tuple(4 * at for at in cell), (4,) * len(sizes)) for cell in cells])
    monkeypatch.delattr(RegionIndex, "_compare")
    assert index.clash() is None


def test_a_pinwheel_cannot_be_cut():
    """Nine boxes around a middle, of which no plane separates any."""
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    regions = [
        Region((3 * row + at[0], 3 * column + at[1]), shape)
        for row, column in itertools.product(range(3), repeat=2)
        for at, shape in pinwheel
    ]
    assert RegionIndex(regions).clash() is None
    assert set(RegionIndex([*regions, Region((1, 1), (1, 1))]).clash()) == {4, len(regions)}

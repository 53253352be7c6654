"""Operators on batches of images and of matrices: pooling, padding, resizing, linear algebra."""

import pytest
import torch
from torch.nn import functional

from dtckpt.dtensor import DTensor

from .operator_checks import S0, S1, S2, P, R, check, distributed

IMAGES, VOLUMES, LINES = (8, 4, 6, 8), (4, 4, 4, 6, 8), (8, 4, 6)

ON_IMAGES = [
    ("avg_pool2d", IMAGES, lambda x: functional.avg_pool2d(x, 2)),
    ("avg_pool3d", VOLUMES, lambda x: functional.avg_pool3d(x, 2)),
    ("adaptive_avg_pool2d", IMAGES, lambda x: functional.adaptive_avg_pool2d(x, (2, 3))),
    ("adaptive_max_pool2d", IMAGES, lambda x: functional.adaptive_max_pool2d(x, (2, 3))),
    ("max_pool2d", IMAGES, lambda x: functional.max_pool2d(x, 2)),
    ("max_pool3d", VOLUMES, lambda x: functional.max_pool3d(x, 2)),
    ("max_pool2d with indices", IMAGES, lambda x: functional.max_pool2d(x, 2, return_indices=True)),
    ("nearest", IMAGES, lambda x: functional.interpolate(x, scale_factor=2)),
    ("nearest to size", LINES, lambda x: functional.interpolate(x, size=9)),
    ("bilinear", IMAGES, lambda x: functional.interpolate(x, size=(9, 5), mode="bilinear")),
    ("bicubic", IMAGES, lambda x: functional.interpolate(x, size=(9, 5), mode="bicubic")),
    ("antialias", IMAGES, lambda x: functional.interpolate(x, size=(3, 5), mode="bilinear", antialias=True)),
    ("trilinear", VOLUMES, lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear")),
    ("reflection_pad2d", IMAGES, lambda x: functional.pad(x, (1, 2, 0, 1), mode="reflect")),
    ("replication_pad1d", LINES, lambda x: functional.pad(x, (1, 2), mode="replicate")),
]
MATRICES = (4, 2, 3, 3)
ON_MATRICES = [
    ("det", torch.linalg.det),
    ("slogdet", torch.linalg.slogdet),
    ("qr", torch.linalg.qr),
    ("inv_ex", torch.linalg.inv_ex),
    ("lu_factor_ex", torch.linalg.lu_factor_ex),
    ("matrix_exp", torch.linalg.matrix_exp),
    ("cholesky_ex", torch.linalg.cholesky_ex),
]


@pytest.mark.parametrize("placed", [S0, S1, (S0, S1), (S1, S0), P], ids=str)
@pytest.mark.parametrize(("name", "shape", "function"), ON_IMAGES, ids=lambda one: one if isinstance(one, str) else "")
def test_images(name, shape, function, placed):
    # What waits for a reduction does so no longer when it would grow.
    is_there = placed != P or "avg" in name or name in {"bilinear", "bicubic", "antialias"}
    results = 2 if "indices" in name else 1
    check(
        function, [torch.randn(shape)], [placed], [placed] * results if is_there else None, most=0 if is_there else None
    )


@pytest.mark.parametrize("placed", [S2, (S2, S0)], ids=str)
def test_images_sharded_over_space_are_moved(placed):
    check(lambda x: functional.max_pool2d(x, 2), [torch.randn(IMAGES)], [placed])


def test_pieces_of_a_batch_may_differ_and_none_may_be_empty():
    check(lambda x: functional.max_pool2d(x, 2), [torch.randn(7, 3, 6, 8)], [S0], S0, most=0)
    check(lambda x: functional.max_pool2d(x, 2), [torch.randn(2, 3, 6, 8)], [S0])
    check(lambda x: functional.avg_pool2d(x, 2), [torch.randn(4, 6, 8)], [S0], S0, most=0)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: functional.pixel_shuffle(x, 2), (4, 8, 3, 3)),
        (lambda x: functional.pixel_unshuffle(x, 2), (4, 8, 4, 6)),
        (lambda x: functional.unfold(x, 2), (4, 3, 4, 6)),
        (lambda x: functional.fold(x, (4, 6), 2), (4, 12, 15)),
    ],
)
@pytest.mark.parametrize("placed", [S0, P, (S0, R), (P, S0)], ids=str)
def test_items_of_one_dim(function, shape, placed):
    # What waits for a reduction may do so no longer where it would grow.
    is_there = placed not in {P, (P, S0)}
    check(function, [torch.randn(shape)], [placed], placed if is_there else None, most=0 if is_there else None)


@pytest.mark.parametrize("placed", [(S0, S0), ((S0, R), (S0, R))], ids=str)
def test_grid_sample(placed):
    images, grid = torch.randn(4, 3, 5, 6), torch.rand(4, 2, 3, 2) * 2 - 1
    check(lambda *given: functional.grid_sample(*given, align_corners=False), [images, grid], placed, placed[0])


def test_fractional_max_pool():
    images, places = torch.randn(4, 3, 8, 8), torch.rand(4, 3, 2)

    def pool(images, places):
        return functional.fractional_max_pool2d(images, 3, output_size=4, _random_samples=places.detach())

    check(lambda images: pool(images, like(images, places)), [images], [S0], S0)


def like(images, places):
    return distributed(places, images.placements) if isinstance(images, DTensor) else places


def test_what_cannot_be_solved_is_an_error():
    singular = distributed(torch.stack([torch.eye(3), torch.zeros(3, 3)] * 4), S0)
    with pytest.raises(torch.linalg.LinAlgError, match="Batch element 1"):
        torch.linalg.solve(singular, singular)


@pytest.mark.parametrize("placed", [S0, (S0, S1), (S1, R)], ids=str)
@pytest.mark.parametrize(("name", "function"), ON_MATRICES, ids=lambda one: one if isinstance(one, str) else "")
def test_matrices(name, function, placed):
    values = torch.randn(MATRICES, dtype=torch.float64)
    values = values @ values.mT + torch.eye(3)
    check(function, [values], [placed], most=None if name in {"det", "slogdet"} else 0, has_gradients=False)


@pytest.mark.parametrize(
    ("right", "placed"),
    [((4, 2, 3, 5), (S0, S0)), ((4, 2, 3), (S0, S0)), ((3, 5), (S0, R)), ((4, 2, 3, 5), ((S0, S1), (S0, S1)))],
    ids=str,
)
def test_solve(right, placed):
    values = torch.randn(MATRICES, dtype=torch.float64) + 4 * torch.eye(3)
    check(torch.linalg.solve, [values, torch.randn(right, dtype=torch.float64)], placed, has_gradients=False)


@pytest.mark.parametrize(("right", "placed"), [((4, 2, 3, 5), (S0, S0)), ((3, 5), (S0, R))], ids=str)
def test_solve_triangular(right, placed):
    values = (torch.randn(MATRICES, dtype=torch.float64) + 4 * torch.eye(3)).tril()

    def solve(matrices, right):
        return torch.linalg.solve_triangular(matrices, right, upper=False)

    check(solve, [values, torch.randn(right, dtype=torch.float64)], placed, S0, most=0, has_gradients=False)


def test_results_that_only_the_operator_sees_take_their_shape():
    values = torch.randn(MATRICES, dtype=torch.float64)
    out = distributed(torch.zeros(4, 2, dtype=torch.float64), S0)
    torch.linalg.det(distributed(values, S0), out=out)
    torch.testing.assert_close(out.full_tensor(), torch.linalg.det(values))

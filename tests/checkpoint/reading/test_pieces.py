"""Checkpoints of other libraries as values: their refusals, and overlapping pieces, which are found."""

import numpy as np
import pytest

from dtckpt.checkpoint.reading.pieces import Piece, PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError
from dtckpt.layout.region import Region


def piece(offset, shape, *, at=0, file="f", strides=None):
    return Piece(Region(offset, shape), file, at, strides)


def tensor(*pieces, shape=(4, 6), dtype="float32", elements=None):
    return PieceTensor("w", shape, dtype, pieces, elements=elements)


def test_facts():
    whole = tensor(piece((0, 0), (4, 2), at=100), piece((0, 2), (4, 4), file="g", strides=(1, 4)))
    assert whole.is_whole
    assert whole.nbytes == 96
    assert whole.pieces[0].element_strides == (2, 1)
    assert [each.stop(whole.itemsize) for each in whole.pieces] == [132, 64]
    index = PieceIndex("any", {"w": whole}, {"tensor": "w"})
    assert index.file_nbytes == {"f": 132, "g": 64}
    assert not tensor(piece((0, 0), (4, 2))).is_whole
    assert tensor(shape=(0, 3)).is_whole
    assert tensor(piece((), ()), shape=()).is_whole


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float7"},
        {"shape": (2, -1)},
        {"shape": (1,) * 33},
        {"shape": (1 << 40, 1 << 40)},
        {"pieces": [piece((0, 0), (5, 6))]},
        {"pieces": [piece((0,), (4,))]},
        {"pieces": [piece((0, 0), (0, 6))]},
        {"pieces": [piece((0, 0), (4, 6), strides=(1,))]},
        {"pieces": [piece((0, 0), (4, 6), strides=(-6, 1))]},
        {"pieces": [piece((0, 0), (4, 6), at=-1)]},
        {"pieces": [piece((0, 0), (4, 6), at=1 << 62)]},
        {"pieces": [piece((0, 0), (4, 6), strides=(1 << 60, 1))]},
        *(
            {"pieces": [piece((0, 0), (4, 6), file=file)]}
            for file in ("", "/etc/passwd", "../x", "a//b", "a\0", "a\\b")
        ),
        {"pieces": [piece((0, 0), (4, 4)), piece((2, 3), (1, 1))]},
        {"shape": (), "pieces": [piece((), ()), piece((), ())]},
    ],
    ids=str,
)
def test_refused(arguments):
    with pytest.raises(CheckpointCorruptError, match="tensor 'w' cannot be read"):
        tensor(*arguments.pop("pieces", ()), **arguments)


def test_a_piece_in_a_stream_ends_with_the_stream():
    stream = Piece(Region((0, 0), (4, 6)), "a", 10, stream_nbytes=900)
    assert stream.stop(2) == 910
    assert PieceIndex("any", {"w": tensor(stream)}, {"tensor": "w"}).file_nbytes == {"a": 910}


def test_elements_in_the_index_itself():
    whole = tensor(elements=np.zeros((4, 6), np.float32))
    assert whole.is_whole
    assert not tensor().is_whole
    for elements in (np.zeros((4, 6)), np.zeros(24, np.float32)):
        with pytest.raises(CheckpointCorruptError, match="its elements differ"):
            tensor(elements=elements)
    with pytest.raises(CheckpointCorruptError, match="its elements differ"):
        tensor(piece((0, 0), (4, 6)), elements=np.zeros((4, 6), np.float32))


def test_a_tree_that_does_not_name_the_tensors():
    for structure in ({"dict": []}, {"list": [{"tensor": "w"}, {"tensor": "w"}]}, {"tensor": "v"}):
        with pytest.raises(CheckpointCorruptError):
            PieceIndex("any", {"w": tensor()}, structure)


def test_a_tensor_of_which_a_small_part_was_saved_is_no_expanded_one():
    shape = (1 << 20, 1 << 20)
    part = PieceTensor("w", shape, "float32", (piece((0, 0), (4, 4)),))
    assert not PieceIndex("any", {"w": part}, {"tensor": "w"}).tensors["w"].is_whole
    whole = PieceTensor("w", shape, "float32", (piece((0, 0), shape, strides=(0, 0)),))
    with pytest.raises(CheckpointCorruptError, match="would be made of 4 bytes"):
        PieceIndex("any", {"w": whole}, {"tensor": "w"})


def test_many_pieces_are_compared_quickly():
    rows = [piece((row, column), (1, 1), at=4 * row) for row in range(3000) for column in (0, 1)]
    assert tensor(*rows, shape=(3000, 2)).is_whole

"""The comparison of new tensors' layouts between clients."""

import pytest

from dtckpt.checkpoint.restoring.new_layouts import validate_same_layouts
from dtckpt.errors import MeshError


@pytest.mark.parametrize(
    "facts",
    [
        {0: {}, 1: {}},
        {0: {"m": ("a", 2, True)}, 1: {"m": ("a", 2, True)}},
        {0: {"m": ("a", 2, True)}, 1: {"m": ("a", 2, True)}, 2: {"n": ("b", 1, True)}},  # pipeline stages
        {0: {"m": ("a", 2, True)}, 1: {}},  # client 1 fills a target
        {0: {"m": ("a", 1, True)}, 1: {"m": ("a", 1, False), "n": ("b", 1, True)}},  # client 1 has no components on m
    ],
)
def test_clients_that_agree(facts):
    validate_same_layouts(facts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({0: {"m": ("a", 2, True)}, 1: {"m": ("b", 2, True)}}, "different layouts on one mesh from clients 0, 1"),
        ({0: {"m": ("a", 2, True)}, 1: {"n": ("a", 2, True)}}, "a mesh of 2 clients from 0, and other meshes from 1"),
        ({0: {"m": ("a", 2, True)}, 1: {"n": ("b", 1, True)}}, "a mesh of 2 clients from 0, and other meshes from 1"),
        ({0: {"m": ("a", 2, True)}, 1: {"m": ("a", 2, False), "n": ("b", 1, True)}}, "a mesh of 2 clients"),
    ],
)
def test_clients_that_disagree(facts, message):
    with pytest.raises(MeshError, match=message):
        validate_same_layouts(facts)

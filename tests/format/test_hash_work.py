"""Keys of untrusted files: keys that take a dict or a set quadratic time are refused, and no honest keys are."""

import random
import time

import numpy as np
import pytest
from storage.untrusted.hash_attacks import colliding_numbers

from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.manifest import costs_from_proto
from dtckpt.format.tree import load

MODULUS = (1 << 61) - 1
COUNT = 20_000
ATTACKS = {
    "equal hashes": [1 + number * MODULUS for number in range(COUNT)],
    "a path of full slots": colliding_numbers(COUNT),
    "equal hashes in tuples": [("a", 1 + number * MODULUS) for number in range(COUNT)],
    "first many honest ones": [*range(10 * COUNT), *(10 * COUNT + number * MODULUS for number in range(1, COUNT))],
}
DRAW = random.Random(7)
HONEST = {
    "positions": range(100_000),
    "large": [DRAW.randrange(1 << 60) for _ in range(100_000)],
    "offsets": [number << 20 for number in range(50_000)],
    "high bits": [(number << 45) % MODULUS for number in range(50_000)],
    "negative": [-number for number in range(50_000)],
    "fractions": [number / 1024 for number in range(50_000)],
    "tenths": [number * 0.1 for number in range(50_000)],
    "pairs": [(number % 100, number) for number in range(50_000)],
    "texts": [str(number) for number in range(50_000)],
    "numbers of numpy": list(np.arange(50_000, dtype=np.uint16)),
    "few": [1 + number * MODULUS for number in range(100)],
}


@pytest.mark.parametrize("keys", ATTACKS.values(), ids=ATTACKS)
def test_attacks_are_refused_soon(keys):
    start = time.process_time()
    with pytest.raises(CheckpointCorruptError, match="takes for ever"):
        validate_hashes(keys)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("keys", HONEST.values(), ids=HONEST)
def test_honest_keys_pass(keys):
    validate_hashes(keys)
    validate_hashes(sorted(keys, key=lambda _: DRAW.random()))


@pytest.mark.parametrize("numbers", [ATTACKS["equal hashes"], ATTACKS["a path of full slots"]])
def test_trees_of_manifests(numbers):
    start = time.process_time()
    keys, members = (",".join(text % number for number in numbers) for text in ('[%d,{"value":0}]', '{"value":%d}'))
    for tree in (f'{{"dict":[{keys}]}}', f'{{"set":[{members}]}}'):
        with pytest.raises(CheckpointCorruptError, match="takes for ever"):
            load(tree.encode())
    with pytest.raises(CheckpointCorruptError, match="takes for ever"):
        costs_from_proto(numbers, [])
    assert time.process_time() - start < 8

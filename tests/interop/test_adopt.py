"""Every block of docs/adopt.md runs on two processes: of before as of after. Two of before can only be compiled."""

import re
from pathlib import Path

import pytest

from .example_cases import call

PAGE = Path(__file__).parents[2] / "docs" / "adopt.md"
CASES = "interop.adopt_cases"
MAX_LINES = 14
MAX_COLUMNS = 72
"""Two blocks stand side by side."""
COMPILED_ONLY = {("Orbax", "before"), ("TensorFlow", "before")}
"""Neither library is among the dependencies of the tests."""


def blocks():
    """Yield the heading, ``before`` or ``after``, the number of the pair there, and the text of each block."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        heading = section.partition("\n")[0].strip("`")
        for number, block in enumerate(re.findall(r"^```python\n(.*?)\n^```$", section, re.M | re.S)):
            yield heading, ("before", "after")[number % 2], number // 2, block


BLOCKS = list(blocks())
RUNS = [each for each in BLOCKS if each[:2] not in COMPILED_ONLY]
SAVES = {
    ("FSDP2", 0): "sharded_names",
    ("torch.distributed.checkpoint", 0): "sharded_names",
    ("torchtitan", 0): "sharded_names",
    ("Hugging Face", 1): "accelerate_names",
    ("TensorFlow", 0): "",
}
EPOCHS = [(3, 3, ["epoch=0-step=3.ckpt", "last.ckpt"]), (3, 6, ["epoch=1-step=6.ckpt", "last.ckpt"])]
LOOPS = {
    ("Lightning", 0): ("lightning_names", EPOCHS),
    ("Lightning", 1): ("lightning_names", EPOCHS),
    ("Hugging Face", 0): ("trainer_names", [(2, 2, ["checkpoint-2"]), (2, 4, ["checkpoint-2", "checkpoint-4"])]),
    ("Orbax", 0): ("manager_names", [[0, 1, 2], [0, 1, 2, 3, 4]]),
}
"""What the first run does, and the second, which goes on."""


def test_the_page_has_a_pair_for_each_kind_of_user():
    pairs = {(heading, number) for heading, _, number, _ in BLOCKS}
    assert pairs == SAVES.keys() | LOOPS.keys()
    assert len(BLOCKS) == 2 * len(pairs)
    assert {(heading, side) for heading, side, *_ in BLOCKS} - {each[:2] for each in RUNS} == COMPILED_ONLY


@pytest.mark.parametrize(("heading", "side", "number", "block"), BLOCKS)
def test_blocks_are_short_python(heading, side, number, block):
    compile(block, f"{PAGE}: {heading}, {side}", "exec")
    lines = block.splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= MAX_COLUMNS
    assert ("dtckpt" in block) == (side == "after")


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("heading", "side", "number", "block"), [pytest.param(*each, id="-".join(map(str, each[:3]))) for each in RUNS]
)
def test_blocks_run(framework_pool, tmp_path, heading, side, number, block):
    pair, folder = (heading, number), str(tmp_path / "job")
    if pair in SAVES:
        arguments = "save_and_load", folder, SAVES[pair], block
        assert framework_pool.values(call, CASES, *arguments, clients=2, group=True) == [True, True]
    else:
        make, done = LOOPS[pair]
        arguments = "run_twice", folder, make, block
        assert framework_pool.values(call, CASES, *arguments, clients=2, group=True) == [done, done]

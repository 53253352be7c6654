"""The catalogue of operators, and the statistics of operators that ran."""

import logging
import pkgutil
from pathlib import Path
from types import ModuleType

import torch
from support.states import needs_newer_torch

from dtckpt import Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.debug import clear_operator_statistics, operator_statistics
from dtckpt.dtensor.operators import dispatch, rules
from dtckpt.dtensor.operators.catalogue import catalogue, entries
from dtckpt.dtensor.operators.registry import COMPOSITES, RULES

DOCUMENT = Path(__file__).parents[3] / "docs" / "operators.md"


@needs_newer_torch("the document lists the operators of 2.13")
def test_the_document_says_what_the_table_does():
    assert DOCUMENT.read_text() == catalogue(), (
        "run python -m dtckpt.dtensor.operators.catalogue > docs/operators.md again"
    )


def test_every_line_of_the_document_can_be_read():
    assert max(map(len, DOCUMENT.read_text().splitlines())) <= 200


def test_every_module_of_rules_is_imported():
    names = {module.name for module in pkgutil.iter_modules(rules.__path__)}
    assert names == {name for name, value in vars(rules).items() if isinstance(value, ModuleType)}


def test_every_functional_operator_of_the_table_has_its_entry():
    routes = {f"aten.{entry.name}": entry.route for entry in entries()}
    for route, said in (("decomposition", COMPOSITES), ("rule", RULES)):
        for func in said:
            if not func._schema.is_mutable and str(func) in routes:
                assert routes[str(func)] == ("rule" if func in RULES else route), func
    assert routes["aten.mm.default"] == "rule"
    assert routes["aten.nonzero.default"] == "replication"


def test_statistics_count_by_route_and_log_once(caplog):
    tensor = distribute_tensor(torch.arange(12.0).reshape(6, 2), abstract_mesh({"x": 4}), [Shard(0)])
    dispatch.clear()
    with caplog.at_level(logging.INFO, "dtckpt.dtensor.operators"):
        for _ in range(3):
            _ = tensor + 1
            tensor.nonzero()
    found = operator_statistics()
    assert found["aten.add.Tensor"] == {"rule": 3, "decomposition": 0, "replication": 0}
    assert found["aten.nonzero.default"] == {"rule": 0, "decomposition": 0, "replication": 3}
    assert [record.getMessage().split()[1] for record in caplog.records] == ["aten.nonzero.default"]
    clear_operator_statistics()
    assert operator_statistics() == {}
    _ = tensor + 1
    assert operator_statistics() == {"aten.add.Tensor": {"rule": 1, "decomposition": 0, "replication": 0}}

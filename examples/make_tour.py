"""Write the notebook tour.ipynb: run its cells and keep their outputs, so that readers see them without running it.

python -m examples.make_tour [examples/tour.ipynb]
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

CELLS = (
    """# A tour of dtckpt

One process with eight virtual devices: no cluster is needed to look around.""",
    """
import torch

import dtckpt

dtckpt.configure_virtual_devices("CPU", 8)
mesh = dtckpt.create_distributed_mesh([("data", 2), ("model", 4)])
mesh
""",
    "A **layout** says which axis splits which dim. A tensor of 6 x 8: rows over `data`, columns over `model`:",
    """
layout = dtckpt.Layout(["data", "model"], mesh)
values = torch.arange(48.0).reshape(6, 8)
tensor = dtckpt.relayout(dtckpt.copy_to_mesh(values, dtckpt.Layout.replicated(mesh, 2)), layout)
tensor
""",
    "Another layout, and the bytes on the network if each device had its own client:",
    """
from dtckpt.dtensor.debug import explain

clients = dtckpt.abstract_mesh({"data": 2, "model": 4}, devices_per_client=1)
rows, columns = dtckpt.Layout(["data", "unsharded"], clients), dtckpt.Layout(["unsharded", "model"], clients)
explain(rows, columns, (1024, 1024), torch.float32)
""",
    "Operators work on DTensors. The result has another layout:",
    """
product = tensor @ tensor.T
print(torch.equal(product.full_tensor(), values @ values.T), product.layout.sharding_specs)
""",
    "Save it, and open the checkpoint:",
    """
dtckpt.save("step_10", {"model": {"w": tensor}, "step": 10})
checkpoint = dtckpt.open_checkpoint("step_10")
checkpoint
""",
    "Restore it onto another mesh; every byte is verified:",
    """
line = dtckpt.create_distributed_mesh([("x", 8)])
state = dtckpt.restore("step_10", mesh=line, layouts={"model/*": dtckpt.Layout(["unsharded", "x"], line)})
print(torch.equal(state["model"]["w"].full_tensor(), values), state["step"])
state["model"]["w"]
""",
    "Any region can be read, without any mesh:",
    """
checkpoint.read("model/w", dtckpt.Region((1, 2), (2, 3)))
""",
)
"""Text and code, in turns."""


def run(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return its outputs as a notebook keeps them."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        for kind, method in (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_")):
            shown = getattr(value, method, lambda: None)()
            if shown is not None:
                data[kind] = shown.splitlines(keepends=True)
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def notebook() -> dict[str, Any]:
    """Return the notebook, with the outputs of its cells. Runs them in a new directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, text in enumerate(CELLS):
            lines = text.strip().splitlines(keepends=True)
            cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": lines}
            if number % 2:
                outputs = json.loads(json.dumps(run(text, names)).replace(os.path.realpath(folder) + "/", ""))
                cell |= {"cell_type": "code", "execution_count": None, "outputs": outputs}
            else:
                cell["cell_type"] = "markdown"
            cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/tour.ipynb").resolve()
    path.write_text(json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n")

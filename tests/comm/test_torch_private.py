"""Private names of PyTorch stand in one module; an older PyTorch than that one allows is refused by one clear error."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtckpt
from dtckpt.comm import torch_private

PACKAGE = Path(dtckpt.__file__).parent
NAMES = {
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C",
    "torch._C._DisableTorchDispatch",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._TorchDispatchModeKey",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_key_parse",
    "torch._C._dispatch_keyset_full_after",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._distributed_c10d.HashStore",
    "torch._C._distributed_c10d.PrefixStore",
    "torch._C._distributed_c10d.Store",
    "torch._C._distributed_c10d.TCPStore",
    "torch._C._dynamo",
    "torch._C._get_dispatch_mode",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._to_dlpack",
    "torch._assert_async",
    "torch._foreach_copy_",
    "torch._foreach_norm",
    "torch._functionalize_unsafe_set",
    "torch._guards.detect_fake_mode",
    "torch._ops",
    "torch._prims_common.suggest_memory_format",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.is_fake",
    "torch._utils",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch.distributed._functional_collectives",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_global_plan",
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._redistribute",
    "torch.distributed.device_mesh._mesh_resources",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._get_default_timeout",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.masked._ops",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.testing._comparison",
    "torch.utils.data._utils",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
}


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of PyTorch that a module's text uses, from ``torch`` on; operators are left out."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [each for each in node.names if is_torch(each.name)]
            known |= {each.asname or "torch": each.name if each.asname else "torch" for each in modules}
        elif isinstance(node, ast.ImportFrom) and is_torch(node.module or ""):
            imported = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            known |= imported
            yield from filter(is_private, imported.values())
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (full := full_name(node.value, known)):
                known[target.id] = full
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_"))
    yield from filter(is_private, (full_name(node, known) for node in attributes))


def is_torch(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "torch"


def is_private(full: str) -> bool:
    is_operator = full.startswith("torch.ops.")
    return not is_operator and any(part[:1] == "_" != part[1:2] for part in full.split("."))


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([known[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in known else ""


def test_private_names_stand_in_one_module():
    found = {module: set(private_names(module.read_text())) for module in PACKAGE.rglob("*.py")}
    assert {module: names for module, names in found.items() if names} == {Path(torch_private.__file__): NAMES}


def test_a_private_name_is_found():
    source = "import torch\nfrom torch import distributed as dist\nworld = dist.group.WORLD\nworld._get_backend\n"
    assert list(private_names(source)) == ["torch.distributed.group.WORLD._get_backend"]


@pytest.mark.share(3, of="processes that start PyTorch")
def test_an_older_pytorch_is_refused():
    program = "import torch; torch.__version__ = '2.8.0'; import dtckpt; dtckpt.save"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1] == "ImportError: dtckpt needs PyTorch 2.9 or newer; got 2.8.0"

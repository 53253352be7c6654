"""Meshes, layouts and tensors that the tests of several parts draw, and how they compare them: bit for bit."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dtckpt import UNSHARDED, DTensor, Layout, Mesh, abstract_mesh, create_mesh, pack, unpack
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.clients import virtual_devices

dtype_names = st.sampled_from(sorted(DTYPES))


def tensor_of(name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return a tensor whose bits follow from its name; every bit pattern may occur, NaNs included."""
    kind = getattr(torch, dtype)
    bits = np.random.default_rng(zlib.crc32(name.encode())).bytes(math.prod(shape) * kind.itemsize)
    data = torch.from_numpy(np.frombuffer(bits, np.uint8).copy())
    if dtype == "bool":
        data = data % 2
    return data.view(kind).reshape(tuple(shape)) if len(bits) else torch.empty(tuple(shape), dtype=kind)


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of a tensor's shape and dtype; torch fills few of the microscaling dtypes."""
    zeros = torch.zeros((*tensor.shape, tensor.itemsize), dtype=torch.uint8)
    return zeros.view(tensor.dtype).reshape(tensor.shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return shape, dtype and bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + flat.view(torch.uint8).numpy().tobytes()


def packed(whole: torch.Tensor, layout: Layout) -> DTensor:
    """Return a DTensor of this client's parts of a whole tensor."""
    shape = tuple(whole.shape)
    parts = [whole[layout.region(device, shape).slices()].clone() for device in layout.mesh.local_device_ids()]
    return pack(parts, layout, shape)


def differences(tensor: DTensor, whole: torch.Tensor) -> list[str]:
    """Return the faults with a DTensor that should hold the elements of ``whole``."""
    if (tuple(tensor.shape), tensor.dtype) != (tuple(whole.shape), whole.dtype):
        return [f"got {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(whole.shape)} {whole.dtype}"]
    found = []
    for device, component in zip(tensor.layout.mesh.local_device_ids(), unpack(tensor), strict=True):
        region = tensor.layout.region(device, tuple(whole.shape))
        if bits_of(component) != bits_of(whole[region.slices()]):
            found.append(f"device {device}, {region}: got {component}, expected {whole[region.slices()]}")
    return found


@st.composite
def axis_sizes(draw, names: str = "abc", max_size: int = 4) -> dict[str, int]:
    count = draw(st.integers(1, len(names)))
    return {axis: draw(st.integers(1, max_size)) for axis in draw(st.permutations(names))[:count]}


MeshMaker = Callable[[dict[str, int]], Mesh]


def gpu_mesh(axes: dict[str, int]) -> Mesh:
    """Return a mesh of CUDA devices of this process, which share the GPUs that there are."""
    with virtual_devices(GPU=math.prod(axes.values())):
        return create_mesh(axes, device_type="GPU")


IS_DEVELOPMENT_TORCH = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether PyTorch is the release that dtckpt is developed with, or later; some tests ask for what is new in it."""


def needs_newer_torch(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not IS_DEVELOPMENT_TORCH, reason=f"PyTorch before 2.13: {reason}")


NUM_GPUS = torch.cuda.device_count()
NCCL = "cpu:gloo,cuda:nccl"


def needs_gpus(number: int) -> list[pytest.MarkDecorator]:
    reason = f"NCCL needs a GPU per client: {number}; there are {NUM_GPUS}"
    return [pytest.mark.cuda, pytest.mark.skipif(number > NUM_GPUS, reason=reason)]


needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not NUM_GPUS, reason="mesh devices on CUDA need a GPU to share"),
]
CLIENTS_WITH_GPUS = [
    pytest.param(3, "gloo", marks=needs_gpu, id="3 share a GPU, messages in host memory"),
    pytest.param(2, NCCL, marks=needs_gpus(2), id="nccl of 2"),
    pytest.param(4, NCCL, marks=needs_gpus(4), id="nccl of 4"),
]
"""How many clients, and the backend of their process group, for `pytest.mark.parametrize`."""
MESH_MAKERS = [pytest.param(abstract_mesh, id="host"), pytest.param(gpu_mesh, marks=needs_gpu, id="gpu")]
"""Where the components of this process's tensors lie, for `pytest.mark.parametrize`."""


@st.composite
def meshes(draw, names: str = "abc", make_mesh: MeshMaker = abstract_mesh) -> Mesh:
    """Meshes whose devices are all local."""
    return make_mesh(draw(axis_sizes(names)))


@st.composite
def layouts(draw, mesh: Mesh, rank: int) -> Layout:
    """Layouts with axes in any order over the dims, or over none."""
    by_dim: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.dim_names)):
        if (dim := draw(st.integers(-1, rank - 1))) >= 0:
            by_dim[dim].append(axis)
    return Layout([tuple(axes) or UNSHARDED for axes in by_dim], mesh)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def cluster_mesh(axes: dict[str, int], num_clients: int, client: int, kind: str = "CPU") -> Mesh:
    """Return a mesh over several clients as one of them sees it; runs of consecutive devices belong to a client."""
    total = math.prod(axes.values())
    share = total // num_clients
    # Clients share the host's GPUs, each from another one on.
    num_names = share if kind == "CPU" else total
    names = [f"/job:worker/replica:0/task:{i // share}/device:{kind}:{i % num_names}" for i in range(total)]
    mine = list(range(client * share, (client + 1) * share))
    ids = np.arange(total).reshape(tuple(axes.values()))
    return Mesh(list(axes), ids, mine, [names[i] for i in mine], "", names)

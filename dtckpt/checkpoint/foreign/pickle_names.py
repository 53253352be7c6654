"""The names that a pickle may contain, and what each name stands for; every other name is refused.

A name is looked up here. It is never imported or called: a reader makes the value itself, by the kind that this module
gives the name::

    VALUES, ARRAYS    plain values and arrays of numpy    `dtckpt.checkpoint.foreign.pickled_values`
    CONTAINERS        nodes of a state tree               `dtckpt.checkpoint.foreign.pickled_tree`
    REBUILDS          tensors, as views of storages       `dtckpt.checkpoint.foreign.pickled_tensors`
    DCP_*             metadata of DCP                     `dtckpt.checkpoint.foreign.dcp_metadata`
    DEEPSPEED_*       fields of DeepSpeed's files         `dtckpt.checkpoint.foreign.deepspeed_fields`
    SHARDED_TENSOR    fields of FSDP1's files             `dtckpt.checkpoint.foreign.fsdp_fields`
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BUILTINS = ("builtins", "__builtin__")
"""The module of Python's own classes in Python 3 and, as protocol 2 has it, in Python 2."""


def _builtin(*kinds: str) -> dict[str, str]:
    return {f"{module}.{kind}": kind for kind in kinds for module in BUILTINS}


VALUES: Mapping[str, str] = {
    **_builtin("set", "frozenset", "complex", "range", "bytes", "bytearray"),
    "__builtin__.xrange": "range",
    "builtins.xrange": "range",
    "_codecs.encode": "encode",
    "torch.Size": "torch.Size",
    "torch.device": "torch.device",
    **{
        f"pathlib{module}.{kind}": kind
        for kind in ("PosixPath", "PurePosixPath", "PureWindowsPath")
        for module in ("", "._local")
    },
    "datetime.date": "date",
    "datetime.datetime": "datetime",
    "datetime.timedelta": "timedelta",
    "datetime.timezone": "timezone",
    "numpy.dtype": "dtype",
    "_io.BytesIO": "BytesIO",
    **{f"numpy.{core}.multiarray.scalar": "scalar" for core in ("core", "_core")},
}
"""The calls that make plain values."""
ARRAYS: Mapping[str, str] = {
    **{f"numpy.{core}.multiarray._reconstruct": "array" for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": "array of a buffer" for core in ("core", "_core")},
}
"""The calls that make arrays of numpy."""
NDARRAY = "numpy.ndarray"
TORCH_DTYPE = re.compile(r"torch\.(bool|[a-z]+[0-9][a-z0-9_]*)")
"""The constants that may stand without a call, as arguments or values."""
CONTAINERS: Mapping[str, str] = {
    "collections.OrderedDict": "OrderedDict",
    "collections.Counter": "Counter",
    "collections.defaultdict": "defaultdict",
    "collections.deque": "deque",
    "types.SimpleNamespace": "SimpleNamespace",
    "argparse.Namespace": "SimpleNamespace",
}
"""The calls that make containers; the kind is a name in `dtckpt.format.containers.CONTAINERS`."""

REBUILDS = (
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",
)
"""The functions by which a tensor appears in a pickle."""
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""The classes of storages that tell a dtype, all in ``torch``. Other dtypes have an untyped storage."""
UNTYPED_STORAGE = "torch.storage.UntypedStorage"
TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
DTENSOR = "torch.distributed.tensor.DTensor"
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"

_DCP = "torch.distributed.checkpoint"
DCP_METADATA = f"{_DCP}.metadata.Metadata"
DCP_TENSOR = f"{_DCP}.metadata.TensorStorageMetadata"
DCP_BYTES = f"{_DCP}.metadata.BytesStorageMetadata"
DCP_PROPERTIES = f"{_DCP}.metadata.TensorProperties"
DCP_CHUNK = f"{_DCP}.metadata.ChunkStorageMetadata"
DCP_INDEX = f"{_DCP}.metadata.MetadataIndex"
DCP_INFO = f"{_DCP}.filesystem._StorageInfo"
DCP_OF_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"

DEEPSPEED_SCALERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)
DEEPSPEED_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
DEEPSPEED_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"

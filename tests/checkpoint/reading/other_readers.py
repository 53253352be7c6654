"""Reads a checkpoint with one other library, in a process in which neither dtckpt nor torch can be imported.

``python other_readers.py READER PATH TENSOR...`` prints, as JSON, dtype, shape and bytes of each of some arrays.
"""

import importlib.abc
import json
import sys
import warnings


class Refusal(importlib.abc.MetaPathFinder):
    """Refuses the import of packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dtckpt", "dtckpt_server", "torch"):
            raise ImportError(f"{name} is not to be used here")


def read_with_tensorstore(path, names):
    import tensorstore as ts

    database = {"driver": "ocdbt", "base": f"file://{path}/"}
    if not ts.KvStore.open(database).result().list().result():
        database = {"driver": "file", "path": f"{path}/"}
    for name in names:
        kvstore = {**database, "path": f"{database.get('path', '')}{name}/"}
        yield name, ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()


def read_with_zarr(path, names):
    import zarr

    group = zarr.open_group(path, mode="r")
    assert {name for name, _ in group.arrays()} | {name for name, _ in group.groups()} == set(group.keys())
    for name in names:
        yield name, group[name][...]


def read_with_xarray(path, names):
    import xarray

    tree = xarray.open_datatree(path, engine="zarr", consolidated=False)
    for name in names:
        folder, _, last = name.rpartition("/")
        dataset = xarray.open_zarr(path, group=folder, consolidated=False, chunks=None)
        assert dataset[last].equals(tree[name])
        yield name, dataset[last].to_numpy()


def read_with_orbax(path, names):
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    wanted = {name: jax.ShapeDtypeStruct((), np.float32) for name in names}  # shapes and dtypes come from storage
    how = ocp.args.PyTreeRestore(
        wanted, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        yield from checkpointer.restore(path, args=how).items()


def main(reader, path, *names):
    sys.meta_path.insert(0, Refusal())
    warnings.simplefilter("error")
    # The only file at the top of a checkpoint of kind zarr that is no part of the hierarchy.
    warnings.filterwarnings("ignore", "Object at dtckpt.manifest is not recognized")
    arrays = globals()[f"read_with_{reader}"](path, names)
    found = {name: (str(array.dtype), array.shape, array.tobytes().hex()) for name, array in arrays}
    assert not {"dtckpt", "torch"} & set(sys.modules)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

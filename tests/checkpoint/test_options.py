"""Options and shapes that cannot be used are refused when they are given, before anything is written."""

import math

import pytest
import torch

import dtckpt
from dtckpt import RestoreOptions, SaveOptions
from dtckpt.errors import ConfigError, RegionError


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_nbytes": 1000.7},
        {"chunk_nbytes": True},
        {"chunk_nbytes": 0},
        {"timeout_s": math.inf},
        {"timeout_s": math.nan},
        {"timeout_s": -1},
        {"overwrite": "no"},
        {"fsync": None},
        {"check_replicas": 1},
        {"save_as_bf16": "yes"},
        {"kvstore": "hdf5"},
        {"codec": "lzma"},
        {"progress": 1},
        {"stored_dtypes": "bfloat16"},
        {"stored_dtypes": {"": "bfloat16"}},
        {"stored_dtypes": {3: "bfloat16"}},
        {"stored_dtypes": {"w": "float16"}},
        {"stored_dtypes": (("w",),)},
    ],
    ids=str,
)
def test_save_options(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"option {name} .*got"):
        SaveOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"cast": "some"}, {"allow_missing": 1}, {"allow_unexpected": "x"}, {"progress": 0}, {"timeout_s": 0}],
    ids=str,
)
def test_restore_options(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"option {name} .*got"):
        RestoreOptions(**wrong)


def test_more_dims_than_storage_has(tmp_path):
    dtckpt.save(tmp_path / "most", {"w": torch.ones([1] * 32)})
    assert dtckpt.restore(tmp_path / "most")["w"].ndim == 32
    with pytest.raises(RegionError, match="expected at most 32 dims"):
        dtckpt.save(tmp_path / "more", {"w": torch.ones([1] * 33)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["most"]

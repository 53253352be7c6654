"""Fixtures of the storage tests: buckets of local object stores, and an empty root of every kind of storage."""

import functools
import itertools
import os
import urllib.request
from contextlib import ExitStack

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.storage.folder import open_folder
from dtckpt.storage.location import location_of

from .object_stores import PROTOCOLS, gateway_to, server_of

_buckets = itertools.count()


@pytest.fixture(scope="session")
def store_of(tmp_path_factory):
    """Gives the gateway to the store of a scheme, whose server starts when it is first asked for."""
    folder = tmp_path_factory.mktemp("stores")
    with ExitStack() as stack:

        @functools.cache
        def store_of(scheme):
            upstream = stack.enter_context(server_of(PROTOCOLS[scheme], folder / scheme))
            return stack.enter_context(gateway_to(PROTOCOLS[scheme], upstream))

        yield store_of


@pytest.fixture
def new_bucket(store_of, monkeypatch):
    """Gives the URL of a new bucket in the store of a scheme."""

    def new_bucket(scheme):
        store = store_of(scheme)
        for name in list(os.environ):
            if name.startswith(store.protocol.variables):
                monkeypatch.delenv(name)
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        name = f"bucket-{os.getpid()}-{next(_buckets)}"
        urllib.request.urlopen(store.protocol.new_bucket(store.url, name), timeout=20).close()
        return f"{scheme}://{name}"

    return new_bucket


@pytest.fixture(params=PROTOCOLS)
def scheme(request):
    return request.param


@pytest.fixture
def store(store_of, scheme):
    return store_of(scheme)


@pytest.fixture
def bucket(new_bucket, scheme):
    return new_bucket(scheme)


KINDS = [f"{where} {kvstore}" for where in ("directory", *PROTOCOLS) for kvstore in ("ocdbt", "zarr")]
KINDS += ["memory zarr", "local zarr"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def kvstore(kind):
    return kind.split()[1]


@pytest.fixture
def root(new_bucket, kind, tmp_path):
    """Where checkpoints of the test may lie: a directory, or the URL of a place that is empty."""
    match kind.split()[0]:
        case "directory":
            yield str(tmp_path)
        case "s3" | "gs" as scheme:
            yield new_bucket(scheme) + "/some/run"
        case "memory":
            MemoryFileSystem.store.clear()
            yield "memory://some/run"
            MemoryFileSystem.store.clear()
        case "local":
            yield f"local://{tmp_path}/run"


def folder_at(url):
    """The folder at a URL."""
    return open_folder(location_of(url))

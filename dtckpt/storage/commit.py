"""The commit, by which a checkpoint appears at its path whole, or not at all: its two kinds behind one interface.

A `CommitTarget` is the path or URL of one checkpoint, which is there or will be. A save builds the checkpoint in the
folder of a `CommitAttempt`, and the attempt's `commit` makes it the checkpoint in one step:

* on a file system by a rename (`dtckpt.storage.commit_by_rename`);
* on an object store, which cannot rename, by a small object that is created once (`dtckpt.storage.commit_by_decision`).

::

    target = commit_target_of(location)
    leader:         attempt = target.begin(token)       other clients:  attempt = target.join(token)
                                                                        attempt.validate(client)
    every client:   attempt.folder.write(...)
    leader:         attempt.commit(overwrite=...)  or  attempt.abandon()
    reader:         target.locate().read(...)

The rest of the package saves and reads through these two interfaces, and does not know which commit it has.
"""

from __future__ import annotations

from pathlib import Path

from dtckpt.errors import ConfigError
from dtckpt.storage import s3_gcs_folder
from dtckpt.storage.commit_by_decision import AttemptRegister, ObjectStoreTarget
from dtckpt.storage.commit_by_rename import DirectoryTarget
from dtckpt.storage.commit_target import CommitTarget
from dtckpt.storage.folder import open_folder
from dtckpt.storage.location import Location


def commit_target_of(where: Location) -> CommitTarget:
    """Return the commit target at a path or URL.

    Raises:
        ConfigError: No back end has this scheme, or the URL has no name to put a checkpoint at.
    """
    if isinstance(where, Path):
        return DirectoryTarget(where)
    parent = where.parent
    if not parent.text.strip("/") and where.scheme in s3_gcs_folder.SCHEMES:
        raise ConfigError(f"{where} is a bucket, not a checkpoint; name a place in it, as in {where}/step_1")
    return ObjectStoreTarget(AttemptRegister(where, open_folder(parent)))

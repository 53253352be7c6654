"""Mounts a file system that only one process sees, for tests of full and read-only disks."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 1 << 14, 1 << 18


def mount_small(folder: str, nbytes: int) -> None:
    """Mount an empty file system of a bounded size, which only this process and its children see.

    Raises:
        OSError: It is not permitted here.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_MOUNTS | (_NEW_USERS if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode())


def forbid_writing(folder: str) -> None:
    """Make a mounted file system read-only; root may not write it either."""
    _call("mount", None, os.fsencode(folder), None, _REMOUNT | _READ_ONLY, None)


def reason_unsupported(folder: str) -> str:
    """Return why `mount_small` cannot be used here; empty if it can."""
    pid = os.fork()
    if pid == 0:
        try:
            mount_small(folder, 1 << 20)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

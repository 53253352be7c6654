"""Supervises another process's system calls: Linux's seccomp user notifications (Linux 5.6 and later).

The kernel stops a thread at a call that changes files and asks the supervisor, which lets the call happen, answers it
itself, or kills the process before it. It needs no privilege, no compiler and no tracer, and sees what C++ threads do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from dataclasses import dataclass
from functools import cached_property

_NUMBERS = {
    "x86_64": {
        "write": 1, "pwrite64": 18, "writev": 20, "pwritev": 296, "pwritev2": 328, "fsync": 74, "fdatasync": 75,
        "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87,
        "symlink": 88, "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265,
        "symlinkat": 266, "fallocate": 285, "renameat2": 316, "copy_file_range": 326, "sendfile": 40, "seccomp": 317,
    },
    "aarch64": {
        "write": 64, "pwrite64": 68, "writev": 66, "pwritev": 70, "pwritev2": 287, "fsync": 82, "fdatasync": 83,
        "truncate": 45, "ftruncate": 46, "openat": 56, "mkdirat": 34, "unlinkat": 35, "renameat": 38, "linkat": 37,
        "symlinkat": 36, "fallocate": 47, "renameat2": 276, "copy_file_range": 285, "sendfile": 71, "seccomp": 277,
    },
}  # fmt: skip
NUMBERS = _NUMBERS.get(platform.machine(), {})
_NAMES = {number: name for name, number in NUMBERS.items()}
_CHANGES_FILES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# <linux/filter.h>, <linux/seccomp.h>, <linux/prctl.h>
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_AT_NUMBER, _AT_OPEN_FLAGS = 0, 16 + 8 * 2
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_NOTIFICATION, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_AT_FDCWD = -100
_PIDFD_GETFD = 438
_MAX_PATH_NBYTES = 4096


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("operand", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def listen() -> int:
    """Have this thread, and all that it starts, ask before calls that change files; return the supervisor's descriptor.

    Raises:
        OSError: The kernel or a sandbox forbids it.
    """
    if "seccomp" not in NUMBERS:
        raise OSError(errno.ENOSYS, f"system calls of {platform.machine()} are not listed here")
    asked = [number for name, number in NUMBERS.items() if name not in ("openat", "seccomp")]
    count = len(asked)
    program = [
        (_LOAD, 0, 0, _AT_NUMBER),
        (_EQUAL, count + 1, 0, NUMBERS["openat"]),
        *((_EQUAL, count - position + 2, 0, number) for position, number in enumerate(asked)),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _AT_OPEN_FLAGS),
        (_ANY_BIT, 0, 1, _CHANGES_FILES),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(program))(*program)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    argument = ctypes.byref(_Program(len(program), instructions))
    return _check(libc.syscall(NUMBERS["seccomp"], _SET_MODE_FILTER, _NEW_LISTENER, argument))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def reason_unsupported() -> str:
    """Return why `listen` cannot be used here; empty if it can."""
    pid = os.fork()
    if pid == 0:
        try:
            listen()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


@dataclass(frozen=True)
class Call:
    """A system call that waits for an answer.

    Args:
        listener: The descriptor that it was received from.
        id: The kernel's number for it.
        thread: The calling thread.
        name: The name of the system call.
        arguments: The raw arguments.
    """

    listener: int
    id: int
    thread: int
    name: str
    arguments: tuple[int, ...]

    @cached_property
    def paths(self) -> list[str]:
        """The paths of its files: absolute, links not followed; the path of a removed file ends in ``(deleted)``."""
        arguments = self.arguments
        match self.name:
            case "rename" | "link":
                return [self._path(_AT_FDCWD, arguments[0]), self._path(_AT_FDCWD, arguments[1])]
            case "renameat" | "renameat2" | "linkat":
                return [self._path(arguments[0], arguments[1]), self._path(arguments[2], arguments[3])]
            case "mkdir" | "rmdir" | "unlink" | "creat" | "truncate":
                return [self._path(_AT_FDCWD, arguments[0])]
            case "openat" | "mkdirat" | "unlinkat":
                return [self._path(arguments[0], arguments[1])]
            case "symlink":
                return [self._path(_AT_FDCWD, arguments[1])]
            case "symlinkat":
                return [self._path(arguments[1], arguments[2])]
            case "copy_file_range":
                return [self._opened(arguments[2])]
        return [self._opened(arguments[0])]

    @property
    def writes(self) -> bool:
        """Whether the call writes data."""
        return self.name in ("write", "writev", "pwrite64", "pwritev", "pwritev2")

    @cached_property
    def data(self) -> bytes:
        """The data of a write."""
        start, count = self.arguments[1:3]
        if self.name in ("write", "pwrite64"):
            return self._memory(start, count)
        vectors = struct.iter_unpack("=QQ", self._memory(start, 16 * count))
        return b"".join(self._memory(base, nbytes) for base, nbytes in vectors)

    @cached_property
    def offset(self) -> int:
        """The position in the file at which a write begins."""
        if self.name in ("write", "writev"):
            with open(f"/proc/{self.thread}/fdinfo/{_signed(self.arguments[0])}") as file:
                return int(next(line for line in file if line.startswith("pos:")).split()[1])
        return self.arguments[3]

    def write_part(self, nbytes: int) -> None:
        """Do only a part of a write, its first bytes, as the kernel may; the caller is told how many."""
        process = os.pidfd_open(_process_of(self.thread))
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            # The caller's own file, so that its position moves.
            shared = _check(libc.syscall(_PIDFD_GETFD, process, _signed(self.arguments[0]), 0))
        finally:
            os.close(process)
        try:
            if self.name in ("write", "writev"):
                os.write(shared, self.data[:nbytes])
            else:
                os.pwrite(shared, self.data[:nbytes], self.offset)
        finally:
            os.close(shared)
        self._answer(value=nbytes)

    def proceed(self) -> None:
        """Let the call happen."""
        self._answer(flags=_CONTINUE)

    def fail(self, code: int) -> None:
        """Let the call fail with an error number, and do nothing."""
        self._answer(error=-code)

    def _answer(self, *, value: int = 0, error: int = 0, flags: int = 0) -> None:
        try:
            fcntl.ioctl(self.listener, _SEND, _RESPONSE.pack(self.id, value, error, flags))
        except FileNotFoundError:
            pass  # the caller was killed meanwhile
        except OSError as problem:
            if problem.errno != errno.EINPROGRESS:
                raise

    def _opened(self, descriptor: int) -> str:
        return os.readlink(f"/proc/{self.thread}/fd/{_signed(descriptor)}")

    def _path(self, folder: int, address: int) -> str:
        name = os.fsdecode(self._text(address))
        if os.path.isabs(name):
            return name
        base = _signed(folder)
        link = f"/proc/{self.thread}/cwd" if base == _AT_FDCWD else f"/proc/{self.thread}/fd/{base}"
        return os.path.normpath(os.path.join(os.readlink(link), name))

    def _text(self, address: int) -> bytes:
        text = b""
        while b"\0" not in text and len(text) < _MAX_PATH_NBYTES:
            end = (address + len(text)) // 4096 * 4096 + 4096  # the next page may not be there
            text += self._memory(address + len(text), end - address - len(text))
        return text.partition(b"\0")[0]

    def _memory(self, address: int, nbytes: int) -> bytes:
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as file:
            file.seek(address)
            data = b""
            while len(data) < nbytes and (more := file.read(nbytes - len(data))):
                data += more
            return data


def _signed(argument: int) -> int:
    """Return an argument that is an ``int`` in C; the upper half of its register may hold anything."""
    return ctypes.c_int(argument & 0xFFFFFFFF).value


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status") as file:
        return int(next(line for line in file if line.startswith("Tgid:")).split()[1])


def receive(listener: int) -> Call | None:
    """Return the next call that waits for an answer; None if its process is gone."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except FileNotFoundError:
        return None
    number, thread, _, call, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return Call(listener, number, thread, _NAMES[call], tuple(arguments))

"""Device names in TensorFlow's spelling, such as ``/job:worker/replica:0/task:3/device:GPU:1``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dtckpt.errors import MeshError

DEVICE_KINDS = ("CPU", "GPU", "TPU")

_PART = {
    "job": re.compile(r"job:(?P<job>[^/]*)"),
    "replica": re.compile(r"replica:(?P<replica>[0-9]+|\*)"),
    "task": re.compile(r"task:(?P<task>[0-9]+|\*)"),
    "device": re.compile(r"(?:device:)?(?P<kind>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<index>[0-9]+|\*))?"),
}
_FULL = re.compile(r"/job:(?P<job>[^/\s|,]*)(?:/replica:[0-9]+)?/task:(?P<task>[0-9]+)/device:(?P<kind>\w+):[0-9]+")
_TASK = re.compile(r"/task:[0-9]+/")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The parts of a device's name; None stands for a part that the name leaves out.

    >>> DeviceSpec.parse("GPU:1").with_defaults(job="worker", replica=0, task=3).to_string()
    '/job:worker/replica:0/task:3/device:GPU:1'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    @classmethod
    def parse(cls, name: str) -> DeviceSpec:
        """Read a name such as ``/job:worker/replica:0/task:1/device:GPU:0``, ``/task:1/GPU:0`` or ``CPU:2``.

        Raises:
            MeshError: A part is unknown, malformed, or there twice.
        """
        fields: dict[str, str] = {}
        for part in filter(None, name.split("/")):
            match = next((m for m in (pattern.fullmatch(part) for pattern in _PART.values()) if m), None)
            new = {key: text for key, text in match.groupdict().items() if text is not None} if match else {}
            if not new or new.keys() & fields.keys():
                raise MeshError(
                    f"device name: got {name!r} (at {part!r}), expected a form such as "
                    "'/job:localhost/replica:0/task:0/device:CPU:0' with each part at most once"
                )
            fields |= new
        kind = fields.get("kind")
        # In TensorFlow's short form, such as ``/gpu:0``, the kind may be in lower case.
        if kind is not None and kind.upper() in DEVICE_KINDS and "device:" not in name:
            kind = kind.upper()
        return cls(
            fields.get("job"),
            _number(fields.get("replica")),
            _number(fields.get("task")),
            kind,
            _number(fields.get("index")),
        )

    def to_string(self) -> str:
        """Return the name; parts that are None are left out, but the index of a device becomes ``*``."""
        parts = [f"/{key}:{getattr(self, key)}" for key in ("job", "replica", "task") if getattr(self, key) is not None]
        if self.device_type is not None:
            parts.append(f"/device:{self.device_type}:{'*' if self.device_index is None else self.device_index}")
        return "".join(parts)

    def __str__(self) -> str:
        return self.to_string()

    def with_defaults(self, job: str, replica: int, task: int) -> DeviceSpec:
        """Return this name with job, replica and task filled in where they are None."""
        return replace(
            self,
            job=job if self.job is None else self.job,
            replica=replica if self.replica is None else self.replica,
            task=task if self.task is None else self.task,
        )


def _number(text: str | None) -> int | None:
    return None if text is None or text == "*" else int(text)


def full_name(device: DeviceSpec | str) -> str:
    """Return a device's complete name; a name that is complete already is returned unchanged.

    Raises:
        MeshError: Job, task, kind or index of the device is left out, or the text is no device name.
    """
    text = str(device)
    if _FULL.fullmatch(text):
        return text
    completed = DeviceSpec.parse(text).to_string()
    if not _FULL.fullmatch(completed):
        raise MeshError(
            f"device name: got {text!r}, expected job, task, kind and index, "
            "as in '/job:localhost/replica:0/task:0/device:CPU:0'"
        )
    return completed


def kind_of(name: str) -> str:
    """Return the device kind in a complete name, in the name's case."""
    return _match(name)["kind"]


def task_of(name: str) -> int:
    """Return the task number in a complete name, which is a client's id."""
    return int(_match(name)["task"])


def with_task(name: str, task: int) -> str:
    """Return a complete name with another task number."""
    return _TASK.sub(f"/task:{task}/", name, count=1)


def _match(name: str) -> re.Match[str]:
    match = _FULL.fullmatch(name)
    if match is None:
        raise MeshError(f"device name: got {name!r}, expected a complete name")
    return match

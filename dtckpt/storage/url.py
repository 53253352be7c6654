"""`Url`: the location of a checkpoint that is no path of a file system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Url:
    """The URL of a checkpoint that is on no file system of this host. A `Url` has the attributes of a `Path` used here.

    Args:
        scheme: The part before ``://``.
        text: The part after ``://``, without a slash at the end. The text is taken literally, percent signs too.
    """

    scheme: str
    text: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.text}"

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, f"{self.text}/{name}")

    @property
    def name(self) -> str:
        """The last segment."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without its last segment."""
        return Url(self.scheme, self.text.rpartition("/")[0])

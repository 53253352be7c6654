"""Members of enums in a state tree: saved by name, and restored through the class of the target.

A checkpoint runs no code, so it cannot hold an enum's class. It holds the names of class and member. A restore looks
the member up by name, in the class of the member that the target holds. Without a target the restore returns an
`EnumMember`, which has the two names.
"""

from __future__ import annotations

import enum
import functools
import operator
from dataclasses import dataclass

from dtckpt.errors import TreeError, capped


@dataclass(frozen=True, slots=True)
class EnumMember:
    """A saved member of an enum whose class is not known. A save treats it as the member itself.

    Args:
        kind: Name of the class.
        name: Name of the member; of a combination of flags their names, joined by ``|``.
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if not (type(self.kind) is type(self.name) is str):
            raise TypeError(f"expected two names; got {self.kind!r} and {self.name!r}")

    def of(self, members: type[enum.Enum], where: str) -> enum.Enum:
        """Return the member of an enum by its name.

        Args:
            members: The class of the enum.
            where: Its path in the tree, for messages.

        Raises:
            TreeError: The enum has no such member.
        """
        try:
            return _by_name(members, self.name)
        except KeyError:
            raise TreeError(
                f"the checkpoint has {self.kind}.{self.name} at {where!r}; {members.__name__} of the target has no "
                f"such member, it has {capped(members.__members__)}"
            ) from None


def _by_name(members: type[enum.Enum], name: str) -> enum.Enum:
    if issubclass(members, enum.Flag):
        return functools.reduce(operator.or_, (members[part] for part in name.split("|") if part), members(0))
    return members[name]


def encode_member(member: enum.Enum, where: str) -> list[str]:
    """Return the names of a member's class and of the member.

    Raises:
        TreeError: The name does not lead back to the member: it is of flags that have no names.
    """
    # The flag without any bit has no name.
    name = member.name or ""
    try:
        is_found = _by_name(type(member), name) is member
    except KeyError:
        is_found = False
    if not is_found:
        raise TreeError(f"cannot save {member!r} at {where!r}: it has no name of its own; pass its value")
    return [type(member).__name__, name]


def decode_member(content: list[str]) -> EnumMember:
    """Return the `EnumMember` of the names that `encode_member` returned."""
    return EnumMember(*content)

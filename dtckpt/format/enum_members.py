"""Members of enums in a state tree: saved by the names of class and member, and given back by the class of a target.

Only code could make the class of an enum anew. So a checkpoint has names, and a restore looks the member's name up in
the class of the member that its target holds. Without a target an `EnumMember` stands for the member.
"""

from __future__ import annotations

import enum
import functools
import operator
from dataclasses import dataclass

from dtckpt.errors import TreeError, capped


@dataclass(frozen=True, slots=True)
class EnumMember:
    """A member of an enum that was saved, where its class is not known. It is saved as the member would be.

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
    """Return what stands for a member, of the names that `encode_member` made."""
    return EnumMember(*content)

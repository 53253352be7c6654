"""Layout tags: a publisher and a reader compare how they understand the elements of a tensor; pure.

Equal names and shapes are no proof of an equal layout: a square weight may be stored transposed, a fused one
interleaved. So a publisher may give a tensor a tag, any text, and a reader that wants the tensor must expect the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from dtckpt.errors import ConfigError, LayoutError, capped

MAX_TAG_CHARS = 1024


def validate_tags(tags: Mapping[str, str]) -> None:
    """Check tags by globs. Raises: ConfigError: They are malformed."""
    for pattern, tag in tags.items():
        if not isinstance(pattern, str) or not pattern or not isinstance(tag, str) or len(tag) > MAX_TAG_CHARS:
            raise ConfigError(
                f"layout_tags has {pattern!r}: {str(tag)[:80]!r}; expected globs over names of tensors, and texts of "
                f"at most {MAX_TAG_CHARS} characters"
            )


def tag_of(name: str, tags: Mapping[str, str]) -> str:
    """Return the tag of a tensor: of the first glob that matches its name; empty if none does."""
    return next((tag for pattern, tag in tags.items() if fnmatchcase(name, pattern)), "")


def validate_expected_tags(found: Iterable[tuple[str, str]], expected: Mapping[str, str], title: str) -> None:
    """Check that tensors have the tags that their reader expects.

    Args:
        found: Names of tensors, and their tags.
        expected: The expected tags, by glob on names; of others the reader expects none.
        title: Name of the checkpoint in messages.

    Raises:
        LayoutError: A tag differs.
    """
    wrong = [(name, tag, tag_of(name, expected)) for name, tag in found if tag != tag_of(name, expected)]
    if wrong:
        texts = (f"{name!r} has tag {tag!r}, expected {wanted!r}" for name, tag, wanted in wrong)
        raise LayoutError(
            f"{title} has tensors in another layout: {capped(texts)}; convert them, or let both sides name the same "
            "tags in layout_tags"
        )

"""Rename the tensors and values of a checkpoint at a restore: by name, glob, regular expression or function."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping

from dtckpt.errors import ConfigError, TensorNameError, TensorNotFoundError, capped

Rename = Mapping["str | re.Pattern[str]", str] | Callable[[str], str]
"""New names by name, by glob, or by compiled regular expression (which must match the whole name); or a function.

The new name of a glob has as many ``*`` as the glob, and each ``*`` stands for the text that the same ``*`` of the glob
matched: ``{"encoder/*/w": "blocks/*/weight"}``. The new name of a regular expression refers to groups as in
`re.Match.expand`. A name that no rule matches stays; a rule for a whole name takes precedence over patterns.
"""


def validate_rename(rules: object) -> None:
    """Check rename rules.

    Raises:
        ConfigError: ``rules`` is neither a function nor a mapping of rules, or a glob and its new name have different
            numbers of ``*``.
    """
    if callable(rules):
        return
    if not isinstance(rules, Mapping) or not all(
        isinstance(rule, str | re.Pattern) and isinstance(new, str) and new for rule, new in rules.items()
    ):
        raise ConfigError(f"option rename must map names or patterns to names, or be a function; got {rules!r}")
    for rule, new in rules.items():
        if isinstance(rule, str) and new.count("*") not in (0, rule.count("*")):
            raise ConfigError(f"option rename: {new!r} must have as many * as {rule!r}, or none")


def renamed(rules: Rename | None, names: Iterable[str]) -> dict[str, str]:
    """Return new name by old name, for the names that the rules change.

    Raises:
        TensorNotFoundError: A rule matches no name.
        TensorNameError: Two rules match one name differently, or two names would become one.
    """
    names = list(names)
    if rules is None:
        return {}
    new_names = _by_function(rules, names) if callable(rules) else _by_rules(rules, names)
    sources: dict[str, str] = {}
    for name in names:
        new = new_names.get(name, name)
        if new in sources:
            raise TensorNameError(f"option rename: {sources[new]!r} and {name!r} would both become {new!r}")
        sources[new] = name
    return {name: new for name, new in new_names.items() if new != name}


def _by_function(rule: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    new_names = {name: rule(name) for name in names}
    for name, new in new_names.items():
        if not isinstance(new, str) or not new:
            raise ConfigError(f"option rename: the function must return a name; got {new!r} for {name!r}")
    return new_names


def _by_rules(rules: Mapping[str | re.Pattern[str], str], names: Iterable[str]) -> dict[str, str]:
    exact = {name: rules[name] for name in names if name in rules}
    new_names, unused = dict(exact), {rule: new for rule, new in rules.items() if rule not in exact}
    for rule, new in list(unused.items()):
        for name in names:
            other = _applied(rule, new, name)
            if other is None or name in exact:
                continue
            unused.pop(rule, None)
            if new_names.setdefault(name, other) != other:
                raise TensorNameError(
                    f"option rename: several rules match {name!r}; it would become {new_names[name]!r} or {other!r}"
                )
    if unused:
        texts = [repr(rule if isinstance(rule, str) else rule.pattern) for rule in unused]
        raise TensorNotFoundError(
            f"option rename: nothing is named {capped(texts)}; the checkpoint has {capped(names)}"
        )
    return new_names


def _applied(rule: str | re.Pattern[str], new: str, name: str) -> str | None:
    """Return the new name if a rule matches."""
    if isinstance(rule, re.Pattern):
        match = rule.fullmatch(name)
        return match.expand(new) if match else None
    if not fnmatch.fnmatchcase(name, rule):
        return None
    # A regular expression with a group for each *, which matches as little as possible, from left to right.
    parts = [re.sub(r"\(\?s:(.*)\)\\[Zz]", r"\1", fnmatch.translate(part)) for part in rule.split("*")]
    match = re.fullmatch("(.*?)".join(parts), name, re.DOTALL)
    stars = iter(match.groups() if match else ())
    return "".join(next(stars, "*") if char == "*" else char for char in new)

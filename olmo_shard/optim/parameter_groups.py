"""Parameter groups: learning-rate multiplier and weight decay by parameter name.

A parameter belongs to the first entry of ``optim.groups`` with a pattern that matches its name. The
settings of a parameter without a group, and the weight decay of a group that gives none, follow
from ``optim.weight_decay`` and ``optim.no_decay``.

Groups are settings of a run and no part of its state: a checkpoint does not hold them.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from olmo_shard.config import OptimConfig
from olmo_shard.errors import ConfigurationError


class GroupSettings(NamedTuple):
    """The part of the update that differs between parameters."""

    lr_multiplier: float
    """Factor of the step's learning rate."""
    weight_decay: float
    """Decoupled weight decay, relative to the multiplied learning rate."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that have their settings from the same lines of the config."""

    label: str
    """Those lines of the config, for the log."""
    settings: GroupSettings
    sizes: dict[str, int] = field(default_factory=dict)
    """Number of elements of each parameter over the whole run, by name."""


def group_parameters(sizes: dict[str, int], config: OptimConfig) -> list[ParameterGroup]:
    """Assign every parameter to a group.

    :param sizes: number of elements of each parameter of the model, by name.
    :returns: groups with at least one parameter, in the order of their first parameters. An entry
        of ``optim.groups`` without a weight decay yields two groups if it has parameters both with
        and without decay.
    :raises ConfigurationError: if a pattern of ``optim.groups`` matches no parameter, or earlier
        entries match every parameter that an entry matches.
    """
    # A misspelt pattern would silently train with the default settings.
    _check_patterns(sizes, config)

    # Keyed by label and settings: no_decay may split the parameters of one entry.
    groups: dict[tuple[str, GroupSettings], ParameterGroup] = {}
    for name, numel in sizes.items():
        label, settings = _settings_of(name, config)
        group = groups.setdefault((label, settings), ParameterGroup(label=label, settings=settings))
        group.sizes[name] = numel
    # An entry after a wider one has no effect, which is as silent as a misspelt pattern.
    for number, entry in enumerate(config.groups):
        if not any(label == _label(number, entry.match) for label, _ in groups):
            raise ConfigurationError(
                f"optim.groups.{number} has no parameter: earlier groups match every parameter "
                f"that {', '.join(entry.match)} matches, and the first match counts; move this "
                "group up, or remove it"
            )
    return list(groups.values())


def describe_groups(groups: Iterable[ParameterGroup]) -> list[str]:
    """One line per group for the log: its settings and its number of parameters."""
    return [
        f"group     {group.label}: {len(group.sizes)} tensor(s), {sum(group.sizes.values()):,} "
        f"parameters, lr x {group.settings.lr_multiplier:g}, "
        f"weight decay {group.settings.weight_decay:g}"
        for group in groups
    ]


def _settings_of(name: str, config: OptimConfig) -> tuple[str, GroupSettings]:
    """The label of a parameter's group, and its settings."""
    without_decay = _matches(name, config.no_decay)
    default_decay = 0.0 if without_decay else config.weight_decay
    for number, entry in enumerate(config.groups):
        if _matches(name, entry.match):
            decay = default_decay if entry.weight_decay is None else entry.weight_decay
            return _label(number, entry.match), GroupSettings(entry.lr_multiplier, decay)
    label = f"no_decay ({', '.join(config.no_decay)})" if without_decay else "all others"
    return label, GroupSettings(1.0, default_decay)


def _label(number: int, patterns: list[str]) -> str:
    return f"groups.{number} ({', '.join(patterns)})"


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(names: Iterable[str], config: OptimConfig) -> None:
    """:raises ConfigurationError: if a pattern of ``optim.groups`` matches no parameter."""
    names = list(names)
    for number, entry in enumerate(config.groups):
        for pattern in entry.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0)
                raise ConfigurationError(
                    f"optim.groups.{number}.match: the pattern {pattern} matches no parameter of "
                    f"the model; the nearest name is {', '.join(nearest)}"
                )

"""Which parameters train, and with what share of the learning rate: patterns of the configuration against the names of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from asyncrl.errors import ConfigError
from asyncrl.train.optimizer_config import LearningRateGroup

NamesOf = Mapping[nn.Parameter, tuple[str, ...]]
"""All names of each parameter, the first one being the one its moments are saved under."""


def names_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every parameter once, with all names it is given under: two of a tied weight."""
    found: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in parameters:
        found[parameter] = (*found.get(parameter, ()), name)
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters that a pattern matches need no gradient from now on.

    Raises ConfigError for a pattern that matches nothing, for one name of a tied weight without the other, and where no parameter
    is left that trains.
    """
    names = names_of(model.named_parameters(remove_duplicate=False))
    for number, pattern in enumerate(patterns):
        if not any(_matches(pattern, name) for known in names.values() for name in known):
            raise _nothing(f"trainer.frozen.{number}", pattern, names)
    for parameter, known in names.items():
        hit = [name for name in known if any(_matches(pattern, name) for pattern in patterns)]
        if hit and len(hit) < len(known):
            missed = next(name for name in known if name not in hit)
            raise ConfigError("trainer.frozen", value=list(patterns), allowed=f"both {hit[0]} and {missed}, or neither: they are tied, "
                              "one tensor", remedy=f"Add {re.escape(missed)!r}, which freezes both, or leave {hit[0]} out.")
        if hit:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in names):
        raise ConfigError("trainer.frozen", value=list(patterns), allowed="patterns that leave something to train",
                          remedy="They match every parameter that would; remove one.")


def group_of(names: NamesOf, groups: Sequence[LearningRateGroup]) -> dict[nn.Parameter, LearningRateGroup | None]:
    """The group of each of these parameters, None for those that none matches.

    Raises ConfigError for a group that decides over no parameter, and for names of a tied weight that go into different ones.
    """
    chosen: dict[nn.Parameter, LearningRateGroup | None] = {}
    for parameter, known in names.items():
        places = [next((n for n, group in enumerate(groups) if _matches(group.match, name)), None) for name in known]
        if len(set(places)) > 1:
            raise ConfigError("trainer.learning_rate_groups", value=[group.match for group in groups],
                              allowed=f"one group for {' and '.join(known)}: they are tied, one tensor",
                              remedy="Let the pattern of one group match each of these names.")
        chosen[parameter] = None if places[0] is None else groups[places[0]]
    for number, group in enumerate(groups):
        if group not in chosen.values():
            raise _nothing(f"trainer.learning_rate_groups.{number}.match", group.match, names)
    return chosen


def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def _nothing(field: str, pattern: str, names: NamesOf) -> ConfigError:
    known = [name for several in names.values() for name in several]
    shown = ", ".join(known[:3]) + (f" … {known[-1]}" if len(known) > 3 else "")
    return ConfigError(field, value=pattern, allowed="a pattern that decides over a parameter which trains",
                       remedy=f"None of {len(known)} names is left for it: {shown}.")

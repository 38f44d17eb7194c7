"""YAML as recipes use it: 1e-4 is a number, a key is written once, and what is read has a bound."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"

YAMLError = yaml.YAMLError

DEEPEST = 64
"""Levels of a tree. What goes through it calls itself at each."""
_MOST_CHARACTERS = 1 << 20
"""A large recipe has ten thousand; the parser reads 100,000 a second."""
_MOST_VALUES = 100_000
"""Aliases written out: a few lines of them can stand for more than a memory holds."""


def read(text: str) -> Any:
    """The plain tree a text describes. Raises YAMLError, also for a key written twice, and for more than a recipe can be."""
    if len(text) > _MOST_CHARACTERS:
        raise YAMLError(f"{len(text)} characters, more than the {_MOST_CHARACTERS} of any recipe")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, known={})
        return loader.construct_document(node)
    except RecursionError:
        raise YAMLError(f"more than {DEEPEST} levels deep") from None
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        # What the values of a tag, such as 2001-99-99 or !!bool maybe, fail with.
        raise YAMLError(f"a value that is none of its kind: {error}") from error
    finally:
        loader.dispose()


def write(tree: Any) -> str:
    """The tree as text that `read` gives back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _measure(node: yaml.Node, *, known: dict[yaml.Node, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """Values and levels of a tree, its aliases written out. Raises YAMLError for too many, too deep, or one that holds itself."""
    if node not in known and depth <= DEEPEST:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        sizes = [_measure(part, known=known, depth=depth + 1) for part in below]
        known[node] = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
    values, levels = known.get(node, (0, DEEPEST))
    if depth + levels > DEEPEST:
        raise YAMLError(f"more than {DEEPEST} levels deep, or an alias within what it stands for")
    if values > _MOST_VALUES:
        raise YAMLError(f"more than {_MOST_VALUES} values, aliases written out")
    return values, levels


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as the number it is (YAML 1.1 takes it for text), and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written = Counter(str(key.value) for key, _ in node.value)
        twice = sorted(key for key, times in written.items() if times > 1)
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"written twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))

"""YAML as recipes use it: 1e-4 is a number, a key is written once."""

from __future__ import annotations

import re
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_FLOAT = "tag:yaml.org,2002:float"

YAMLError = yaml.YAMLError


def read(text: str) -> Any:
    """The plain tree a text describes. Raises YAMLError, also for a key written twice."""
    return yaml.load(text, Loader=_Loader)


def write(tree: Any) -> str:
    """The tree as text that `read` gives back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as the number it is (YAML 1.1 takes it for text), and refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"written twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))

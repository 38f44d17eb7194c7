"""References to functions in configuration files: `package.module:name`, or `file.py:name` beside the recipe."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


def resolve_reference(reference: str, *, base: Path, field: str) -> str:
    """The reference with its file made absolute against `base`. Raises ConfigError when the form or the file is wrong."""
    place, colon, name = reference.rpartition(":")
    is_file = place.endswith(".py")
    if not colon or not name.isidentifier() or not (is_file or all(part.isidentifier() for part in place.split("."))):
        raise ConfigError(field, value=reference, allowed="'package.module:function' or 'file.py:function'",
                          remedy="Lambdas and bound objects cannot be named in a file; write a module-level function.")
    if not is_file:
        return reference
    path = base / place
    if not os.path.isfile(path):
        raise ConfigError(field, value=reference, allowed="a file that exists", remedy=f"Looked for {os.path.abspath(path)}.")
    return f"{path.resolve()}:{name}"


def load_function(reference: str, *, field: str) -> Callable[..., Any]:
    """Import what a resolved reference names. Raises ConfigError when it is missing or not callable.

    What the module itself raises while it runs is raised as it is: the traceback is the user's own.
    """
    place, _, name = reference.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, SyntaxError, OSError) as error:
        raise ConfigError(field, value=reference, allowed="an importable module",
                          remedy=f"Importing failed: {type(error).__name__}: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(field, value=reference, allowed=f"a function that {place} defines", remedy=f"It defines {known}.")
    return function


def check_arguments(function: Callable[..., Any], *given: object, field: str, arguments: Mapping[str, Any], **added: object) -> None:
    """Raise ConfigError unless `function(*given, **added, **arguments)` is a call its signature allows."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some builtins have no signature to look at.
        return
    try:
        signature.bind(*given, **added, **arguments)
    except TypeError as error:
        raise ConfigError(f"{field}.arguments", value=dict(arguments), allowed=f"what {getattr(function, '__name__', function)}{signature} "
                          "takes", remedy=f"Mend the call: {error}.") from error


def source_file(reference: str) -> Path | None:
    """The Python file a resolved reference lies in; None when there is none. Imports no more than the packages above it."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    try:
        spec = importlib.util.find_spec(place) if place else None
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _load_file(path: Path) -> Any:
    name = f"asyncrl_recipe_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

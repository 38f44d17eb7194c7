"""The folder of an ablation: whether it can be made, whose results lie there, and that one process has it at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from asyncrl.ablate.config import Ablation
from asyncrl.errors import ConfigError
from asyncrl.paths import claim

RESULTS, TABLE = "results.json", "table.md"
_MOST_FOLDER_BYTES = 3072
"""Of its path; what a run writes below it has to fit into the 4096 that a path may have."""


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Made where there is none, and this process's while it lasts. Raises ConfigError."""
    try:
        lock = claim(folder.absolute() / "ablation")
    except ConfigError as error:
        is_taken = error.field == "run.name"
        raise ConfigError("--out", value=str(folder), allowed="a folder that can be written, and that no other `asyncrl ablate` works in",
                          remedy="Wait for that one, or choose another folder." if is_taken else error.remedy) from error
    with lock:
        yield


def require_folder(folder: Path) -> None:
    """Raise ConfigError for what can be known not to become a folder, before it is made."""
    place, remedy = folder.absolute(), ""
    if len(os.fsencode(place)) > _MOST_FOLDER_BYTES:
        remedy = f"Its path has {len(os.fsencode(place))} bytes."
    for nearest_there in () if remedy else (place, *place.parents):
        try:
            nearest_there.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            remedy = f"{error.strerror}."
        else:
            if not nearest_there.is_dir() or not os.access(nearest_there, os.W_OK | os.X_OK):
                remedy = f"{nearest_there} is none."
        break
    if remedy:
        raise ConfigError("--out", value=str(folder), allowed="a folder that can be written, or made", remedy=f"{remedy} Choose another.")


def require_own_results(folder: Path, ablation: Ablation, *, name: str, profile: str) -> None:
    """Raise ConfigError where what would be written over is not this ablation's: of its name, profile, recipe and axes."""
    place, table = folder / RESULTS, folder / TABLE
    own = {"ablation": name, "profile": profile, "recipe": ablation.recipe, "axes": sorted(ablation.axes)}
    try:
        tree = json.loads(place.read_text(encoding="utf-8"))
        there = {key: sorted(tree[key]) if key == "axes" else tree[key] for key in own}
    except FileNotFoundError:
        there = dict(own)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        there = {}
    if there == own and table.exists() and not _is_headed(table, name):
        place, there = table, {}
    if there != own:
        found = ", ".join(f"{key} {there[key]}" for key in own if there and there[key] != own[key]) or "not what an ablation writes"
        raise ConfigError("--out", value=str(folder), allowed=f"a folder whose {place.name}, if any, is of this ablation and profile",
                          remedy=f"There it is of another: {found}. Choose another folder, or move what it holds.")


def _is_headed(table: Path, name: str) -> bool:
    try:
        return table.read_text(encoding="utf-8").startswith(f"# {name}\n")
    except (OSError, ValueError):
        return False

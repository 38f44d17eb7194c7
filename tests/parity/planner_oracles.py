"""Answers numerical cases of the planner through the public API of `asyncrl.plan`.

A case has a name, which says what is asked for, and inputs. The kind is read off the name's parts (`s01_chat_total` asks for the step of
a ledger), so that any case of a kind is answered, whatever its numbers.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

PARTS = ("planner_ledgers", "planner_shapes", "planner_links", "planner_agents", "planner_laws")
"""Modules of this folder; each has `answer(name, inputs)`, and gives None for a case that is not of its kinds."""
_ROOT = str(Path(__file__).parents[2])


def evaluate(name: str, inputs: dict[str, Any]) -> Any:
    """What the library says about a case: a number, or numbers by name. Raises KeyError for a kind it does not cover."""
    if _ROOT not in sys.path:  # where this file alone was loaded, by its path
        sys.path.insert(0, _ROOT)
    for part in PARTS:
        found = importlib.import_module(f"tests.parity.{part}").answer(name, inputs)
        if found is not None:
            return found
    raise KeyError(name)

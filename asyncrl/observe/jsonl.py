"""One JSON object a line: metrics, and a group of rollouts now and then, readable while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.types import RolloutGroup


class JsonlWriter:
    """Appends objects to a file, flushed line by line. NaN and infinity become null, NumPy scalars numbers, at any depth."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def iterate_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file `JsonlWriter` wrote, one at a time; a missing file has none.

    A line that was not finished is left out, and so is what is no object.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from (row for line in lines if (row := _parsed(line)) is not None)


def cut_jsonl(path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Leave the rows to keep in the file, and give them. A last line that was not finished goes, and so does what is no object, as
    a machine that lost its power may leave it; a missing file has no rows.

    The file is replaced as a whole: who reads it meanwhile sees the old rows or the new ones.
    """
    written = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    kept = [(line, row) for line in written.splitlines() if (row := _parsed(line)) is not None and keep(row)]
    whole = "".join(f"{line}\n" for line, _ in kept)
    if whole != written:
        place = path.with_name(f".{path.name}.cut")
        place.write_text(whole, encoding="utf-8")
        place.replace(path)
    return [row for _, row in kept]


def rollout_rows(group: RolloutGroup, *, step: int, decode: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Rows that show each rollout of a group token by token: text, tokens, logprobs, versions, mask, reward, status, error."""
    return [{"step": step, "prompt_id": group.prompt.prompt_id, "group_id": group.group_id, "index": rollout.index,
             "status": rollout.status.value, "error": rollout.error, "rewards": dict(rollout.rewards), "text": decode(sequence.tokens),
             "tokens": sequence.tokens.tolist(), "loss_mask": sequence.loss_mask.astype(int).tolist(),
             "rollout_logprobs": [round(float(value), 6) for value in sequence.rollout_logprobs],
             "policy_versions": sequence.policy_versions.tolist()}
            for rollout in group.rollouts for sequence in rollout.sequences]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

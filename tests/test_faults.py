"""docs/faults.md knows every error there is, and every way in which a limit ends a run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from asyncrl import cli, errors
from asyncrl.types import Status

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `RunAborted: (.+?)` \|", PAGE, re.MULTILINE)


def text_of(node: ast.expr) -> str:
    """A message as the page writes it: an ellipsis for what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)


def aborted_messages() -> list[str]:
    """What `RunAborted` is given, in the whole package."""
    calls = [node for path in (ROOT / "asyncrl").rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RunAborted"]
    return sorted({text_of(call.args[0]) for call in calls if isinstance(call.args[0], ast.JoinedStr | ast.Constant)})


def explains(row: str, message: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, row.split("…"))), message, re.DOTALL) is not None


@pytest.mark.parametrize("message", aborted_messages())
def test_every_limit_that_ends_a_run_is_on_the_page(message: str) -> None:
    assert [row for row in ROWS if explains(row, message)], message


def test_the_page_names_no_limit_that_is_gone() -> None:
    elsewhere = "… of the last … rollouts"  # tests/rollout/test_error_budget.py has the words of this one
    unused = [row for row in ROWS if not any(explains(row, message) for message in aborted_messages())]
    assert [row for row in unused if not row.startswith(elsewhere)] == []


def test_every_error_and_every_kind_of_failure_is_on_the_page() -> None:
    kinds = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.AsyncRLError)]
    assert [name for name in kinds if name != "AsyncRLError" and name not in PAGE] == []
    failures = [status.value for status in Status if status.is_error and status is not Status.INTERRUPTED]
    assert [value for value in failures if f"| `{value}` |" not in PAGE] == []


def test_every_exit_code_is_on_the_page() -> None:
    codes = [value for name, value in vars(cli).items() if name.startswith("EXIT_")]
    assert len(codes) >= 5
    assert [code for code in codes if not re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)] == []

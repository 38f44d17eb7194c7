"""Nothing in the package unpickles or runs what it reads, and nothing listens at a port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.weights.meeting import Meeting

PACKAGE = Path(__file__).parents[1] / "asyncrl"
UNPICKLERS = "c?pickle|cloudpickle|dill|marshal|shelve|joblib"
FORBIDDEN = {
    "pickle": rf"\bimport\s+({UNPICKLERS})\b|\bfrom\s+({UNPICKLERS})\b|\b({UNPICKLERS})\.loads?\b",
    "torch.load": r"\btorch\.load\(",
    "allow_pickle": r"allow_pickle\s*=\s*True",
    "multiprocessing": r"\bimport\s+multiprocessing|\bfrom\s+multiprocessing|torch\.multiprocessing",
    "eval": r"(?<![\w.])(eval|exec)\(",
    "unsafe yaml": r"yaml\.(unsafe_load|full_load)|Loader=yaml\.(Unsafe|Full)?Loader",
    "shell": r"shell\s*=\s*True|os\.system\(",
    "listening": r"\.listen\(|start_server\(|0\.0\.0\.0"}
MEETING = "weights/meeting.py"
"""Listens at a socket that is a file of the user's own."""


@pytest.mark.parametrize("kind", sorted(FORBIDDEN))
def test_no_file_of_the_package_uses(kind: str) -> None:
    found = [f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}" for path in sorted(PACKAGE.rglob("*.py"))
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if re.search(FORBIDDEN[kind], line)]
    assert [line for line in found if kind != "listening" or not line.startswith(MEETING)] == []


def test_what_listens_is_a_file_that_only_its_user_can_open(tmp_path: Path) -> None:
    text = (PACKAGE / MEETING).read_text(encoding="utf-8")
    assert re.findall(r"socket\.socket\((.*)\)", text) == ["socket.AF_UNIX"] * 2
    Meeting(tmp_path)
    assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir() if path.is_socket()] == ["0o600"]

"""What CONTRIBUTING asks of every file and a machine can count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 8
FILES = sorted(path for folder in ("asyncrl", "recipes", "benchmarks", "docs", "tests") for path in (ROOT / folder).rglob("*.py"))
PACKAGE = [path for path in FILES if (ROOT / "asyncrl") in path.parents]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, Function)]


def public(nodes: list[ast.stmt]) -> list[Definition]:
    """Definitions of a module and of its public classes; those inside functions are nobody else's."""
    found = [node for node in nodes if isinstance(node, Definition) and not node.name.startswith("_") and not is_setter(node)]
    return found + [inner for node in found if isinstance(node, ast.ClassDef) for inner in public(node.body)]


def is_setter(node: Definition) -> bool:
    """The property says what both give."""
    return any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)


def place(path: Path, node: Definition) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    assert [place(path, node) for node in functions(path) if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_what_is_public_says_what_it_gives(path: Path) -> None:
    tree = parsed(path)
    assert ast.get_docstring(tree), "the file itself"
    assert [place(path, node) for node in public(tree.body) if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_more_parameters_than_that_are_a_type(path: Path) -> None:
    assert [place(path, node) for node in functions(path) if len(node.args.args) + len(node.args.kwonlyargs) > MAX_PARAMETERS] == []

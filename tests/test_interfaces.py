"""docs/interfaces.md is the contract between the parts: every signature on the page is the one in the code, and none is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "interfaces.md"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def page_definitions() -> list[tuple[str, Definition]]:
    """Module and stub of everything the page shows: a block of Python opens with the module it shows, as a comment."""
    found: list[tuple[str, Definition]] = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        first = block.split("\n", 1)[0]
        assert re.fullmatch(r"# asyncrl[\w.]+", first), f"a block opens with {first!r}, not with its module"
        found += [(first[2:], node) for node in ast.parse(block).body if isinstance(node, Definition)]
    return found


def code_definition(module: str, name: str) -> Definition:
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and node.name == name:
            return node
    raise AssertionError(f"{module} does not define {name}; docs/interfaces.md says it does")


def beside(module: str) -> set[str]:
    """Classes that a module defines: what one inherits from them it has as well."""
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def is_property(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def public_lines(node: Definition) -> list[str]:
    """One line for each public field, property, enum member and method; of a function its signature."""
    if not isinstance(node, ast.ClassDef):
        return [signature(node)]
    lines = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            lines.append((ast.unparse(item.target), f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}"))
        elif isinstance(item, ast.Assign):
            lines.append((ast.unparse(item.targets[0]), ast.unparse(item)))
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            returned = f"{item.name}: {ast.unparse(item.returns) if item.returns else None}"
            lines.append((item.name, returned if is_property(item) else signature(item)))
    return sorted(line for name, line in lines if name == "__init__" or not name.startswith("_"))


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{prefix} {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else None}"


DEFINITIONS = page_definitions()


@pytest.mark.parametrize(("module", "shown"), DEFINITIONS, ids=[f"{module}.{node.name}" for module, node in DEFINITIONS])
def test_the_page_shows_what_the_code_says(module, shown):
    assert public_lines(shown) == public_lines(code_definition(module, shown.name))


def test_the_page_shows_every_contract_between_the_parts():
    shown = {node.name for _, node in DEFINITIONS}
    assert shown >= {
        "Prompt", "Sampling", "Status", "Span", "Sequence", "SequenceBuilder", "Rollout", "RolloutGroup", "Batch",
        "Interruption", "Capabilities", "GenerationRequest", "Chunk", "Ack", "Health", "Engine",
        "Turn", "Outcome", "Session", "Env", "RewardPool", "Ledger",
        "Slot", "BufferView", "Missing", "Policy", "ReplayBuffer", "BatchRecord", "Recorder",
        "CorrectionBatch", "Corrected", "correct", "StepResult", "Trainer",
        "Piece", "Part", "TensorEntry", "Manifest", "RankPublication", "merge", "Publisher", "StoreTransport", "Receiver",
        "Reply", "Child", "Channel", "serve_calls", "Console", "Face"}


@pytest.mark.parametrize(("protocol", "implementation"), [
    ("asyncrl.rollout.engine:Engine", "asyncrl.rollout.fake_engine:FakeEngine"),
    ("asyncrl.rollout.engine:Engine", "asyncrl.rollout.inline_engine:InlineEngine"),
    ("asyncrl.rollout.engine:Engine", "asyncrl.rollout.child_engine:ChildEngine"),
    ("asyncrl.observe.console:Face", "asyncrl.observe.plain:PlainFace"), ("asyncrl.observe.console:Face", "asyncrl.observe.live:LiveFace"),
    ("asyncrl.rollout.env:Env", "asyncrl.rollout.env:SingleTurn"),
    ("asyncrl.rollout.env:Env", "asyncrl.rollout.by_source:BySource"),
    ("asyncrl.buffer.policies:Policy", "asyncrl.buffer.policies:Lease"),
    ("asyncrl.buffer.policies:Policy", "asyncrl.buffer.policies:Soft"),
    ("asyncrl.buffer.policies:Policy", "asyncrl.buffer.policies:FixedLag"),
    ("asyncrl.buffer.policies:Policy", "asyncrl.buffer.policies:Drop"),
    ("asyncrl.buffer.policies:Policy", "asyncrl.buffer.policies:TokenMask"),
    ("asyncrl.buffer.recorder:Recorder", "asyncrl.buffer.recorder:MemoryRecorder")])
def test_an_implementation_has_the_methods_of_its_protocol(protocol, implementation):
    def methods(place: str) -> dict[str, str]:
        module, name = place.split(":")
        node = code_definition(module, name)
        above = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in beside(module)]
        return {name: arguments for base in above for name, arguments in methods(f"{module}:{base}").items()} | {
            item.name: ast.unparse(item.args) for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_") and not is_property(item)}
    promised, kept = methods(protocol), methods(implementation)
    assert {name: kept.get(name) for name in promised} == promised

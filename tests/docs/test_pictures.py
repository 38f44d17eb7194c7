"""The pictures are those that the script draws, of numbers that the library gives, and the text tells what they show."""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import re
from types import ModuleType
from typing import Any

import matplotlib
import pytest

from asyncrl.buffer.config import make_policy
from asyncrl.clock import run_virtual
from asyncrl.config import load_config
from asyncrl.errors import StalenessError
from asyncrl.rollout.engine import Interruption
from tests.docs.pages import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PICTURES))
    return importlib.import_module("draw")


def described(name: str) -> Any:
    """The numbers in the description of a committed picture."""
    (text,) = re.findall(r"<dc:description>(.*?)</dc:description>", (PICTURES / f"{name}.svg").read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(html.unescape(text))


def test_the_numbers_in_the_pictures_are_those_of_the_library(draw: ModuleType) -> None:
    made = dict(draw.numbers())
    assert sorted(made) == sorted(path.stem for path in PICTURES.glob("*.svg"))
    for name, numbers in made.items():
        assert json.loads(numbers) == described(name), name


def test_the_pictures_are_what_the_script_draws(draw: ModuleType, tmp_path) -> None:
    if f"Matplotlib v{matplotlib.__version__}," not in (PICTURES / "ledger.svg").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib draws other bytes; the numbers are compared above")
    draw.write(tmp_path)
    for path in PICTURES.glob("*.svg"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_text_on_staleness_tells_what_the_picture_shows() -> None:
    data = described("staleness")
    groups = {int(number): group for number, group in data["groups"].items()}

    def batch(version: int) -> list[int]:
        return sorted(number for number, group in groups.items() if group["version"] == version)

    assert data["capacity"] == 11 == sum(group["admitted"] == 0 for group in groups.values())
    assert (batch(0), batch(1), batch(2)) == ([0, 1, 2, 4], [3, 5, 6, 8], [7, 9, 10, 11])
    assert [groups[batch(version)[0]]["taken"] for version in range(3)] == [7, 14, 26]
    assert groups[3]["done"] > 7
    assert {groups[number]["staleness"] for number in batch(0)} == {0}
    assert {groups[number]["staleness"] for number in batch(1)} == {1}
    assert [groups[number]["freed"] for number in batch(0)] == [16] * 4 == [groups[number]["admitted"] for number in range(11, 15)]
    assert {groups[number]["tokens"][0][1] for number in range(11, 15)} == {1}
    assert max(groups[number]["done"] for number in (9, 10, 12, 14)) == 24
    assert groups[7]["done"] == groups[7]["taken"] == 26
    assert {version for _, version in groups[7]["tokens"]} == {0, 1, 2}
    assert max(group["staleness"] or 0 for group in groups.values()) == groups[7]["staleness"] == 2
    assert batch(3) == [12, 13, 14, 15], "with slots freed at second 7 those would be of version 0"


def test_the_text_has_the_window_and_the_capacity_of_the_quickstart() -> None:
    policy = make_policy(load_config("arithmetic/quickstart").buffer)
    shown = f"P = {policy.groups_per_step} and W = {policy.effective_window}: B = {policy.capacity_groups}"
    assert shown in (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")


def test_an_engine_that_says_too_early_what_it_holds_breaks_the_bound(draw: ModuleType) -> None:
    """The same run, but the engine samples on for a while after its acknowledgement."""

    class Hasty(draw.Miniature):
        async def _sync(self) -> None:
            while True:
                manifest = await self.manifests.get()
                self.buffer.acknowledge("engine", manifest.version)
                await draw.asyncio.sleep(5.0)
                await self.router.update(manifest, Interruption.KEEP)

    made = draw.staleness_script()
    script = dataclasses.replace(made, tokens=lambda key: 4)
    with pytest.raises(ExceptionGroup) as failures:
        run_virtual(Hasty(script, **draw.STALENESS).play())
    (failure,) = failures.value.exceptions
    assert isinstance(failure, StalenessError)
    assert "staleness 3" in str(failure)


def test_the_interruptions_are_as_the_table_says() -> None:
    data = described("interruption")
    running = {kind: seen["spans"][0] for kind, seen in data.items()}
    assert [span[2:] for span in running["keep"]] == [[0, True], [1, False]]
    assert [span[2:] for span in running["recompute"]] == [[0, True], [1, True]]
    assert [span[2:] for span in running["drain"]] == [[0, True]]
    assert [seen["recomputed"] > 0 for seen in (data["keep"], data["recompute"], data["drain"])] == [False, True, False]


def test_the_ledger_in_the_picture_closes_and_both_ends_hold_the_same_weights() -> None:
    account = described("ledger")["now"]
    placed = [account[name] for name in ("trained", "masked", "buffered", "in_flight")] + list(account["dropped"].values())
    assert account["generated"] == [sum(column) for column in zip(*placed, strict=True)]
    rows = described("weight_sync")["rows"]
    assert all(row["published_hash"] == row["received_hash"] for row in rows)
    assert [row["mode"] for row in rows] == ["dense", "blk16", "blk16", "bitmap", "dense"]

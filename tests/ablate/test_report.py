"""What is written of an ablation: every axis in its place, failures too."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from asyncrl.ablate.config import Ablation
from asyncrl.ablate.grid import PlannedRun, points_of
from asyncrl.ablate.measure import Curve, Measured
from asyncrl.ablate.plots import draw
from asyncrl.ablate.report import results, write_results, write_table
from asyncrl.ablate.runs import Record
from tests.ablate.scene import ABLATION

THIRD = {"size": {"kind": "values", "keys": ["buffer.group_size"], "values": [4, 8]}}
TABLE = """\
# small

base, 3 steps, seeds 0, 1; commit abc. Mean ± standard error over seeds; (n) where fewer ended well.

## reward

| arm | rate 0.01 | rate 0.02 |
| --- | --- | --- |
| plain | 0.5 ± 0.5 | 1.5 ± 0.5 |
| corrected | 1.5 ± 0.5 | 2 (1) |

## held-out

| arm | rate 0.01 | rate 0.02 |
| --- | --- | --- |
| plain | - | - |
| corrected | - | - |

## reward: difference to rate 0.01

| arm | rate 0.02 |
| --- | --- |
| plain | 1 ± 0 |
| corrected | 1 (1) |

## reward: difference to arm plain

| arm | rate 0.01 | rate 0.02 |
| --- | --- | --- |
| corrected | 1 ± 0 | 1 (1) |

## Failed

- rate 0.02, arm corrected, seed 1: exit code 1: it was too good
"""


def ended(ablation: Ablation, *, failing: tuple[str, ...] = ()) -> list[Any]:
    """A run of each point and seed; its reward is the seed and the place of each label on its axis, summed up."""
    runs = []
    for seed, point in itertools.product(ablation.seeds, points_of(ablation)):
        value = float(seed + sum(ablation.labels(axis).index(label) for axis, label in point.items()))
        failed = tuple(point.values()) == failing and seed == ablation.seeds[-1]
        record = Record(key="k", wall_s=1.0, commit="abc", error="exit code 1:\nit was too good" if failed else None)
        curve = Curve((1, 2, 3), (value - 0.2, value - 0.1, value))
        run = PlannedRun(point, seed, None, "k")  # type: ignore[arg-type]
        runs.append((run, record, Measured(3, {"reward/total/mean": curve}, {"reward": value, "held-out": None})))
    return runs


def made(**changes: Any) -> Ablation:
    return Ablation.model_validate(ABLATION | changes)


def test_the_table_has_the_axis_over_from_left_to_right_and_says_what_failed(tmp_path: Path) -> None:
    ablation = made()
    write_table(tmp_path / "table.md", ablation, ended(ablation, failing=("0.02", "corrected")), name="small")
    assert (tmp_path / "table.md").read_text() == TABLE


def test_any_number_of_axes_has_a_row_for_each_combination(tmp_path: Path) -> None:
    one, three = made(axes={"rate": ABLATION["axes"]["rate"]}), made(axes=ABLATION["axes"] | THIRD, over="arm")
    write_table(tmp_path / "one.md", one, ended(one), name="one")
    assert "| rate 0.01 | rate 0.02 |\n| --- | --- |\n| 0.5 ± 0.5 | 1.5 ± 0.5 |\n" in (tmp_path / "one.md").read_text()
    write_table(tmp_path / "three.md", three, ended(three), name="three")
    assert ("| rate | size | arm plain | arm corrected |\n| --- | --- | --- | --- |\n| 0.01 | 4 | 0.5 ± 0.5 | 1.5 ± 0.5 |\n"
            "| 0.01 | 8 | 1.5 ± 0.5 | 2.5 ± 0.5 |\n") in (tmp_path / "three.md").read_text()


def test_the_results_hold_everything_and_a_line_for_each_run(tmp_path: Path) -> None:
    ablation = made()
    tree = results(ablation, ended(ablation, failing=("0.02", "corrected")), name="small", profile="full")
    write_results(tmp_path / "results.json", tree)
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(tree))
    assert sum('"seed": ' in line for line in text.splitlines()) == 8
    assert tree["axes"]["arm"]["corrected"] == {"correction.truncate_high": 3.0}
    assert tree["reference"] == {"rate": "0.01", "arm": "plain"}
    assert {"point": {"rate": "0.02", "arm": "corrected"}, "report": "reward", "mean": 2.0, "standard_error": None,
            "seeds": 1} in tree["means"]
    assert {"axis": "rate", "point": {"rate": "0.02", "arm": "plain"}, "reference": "0.01", "report": "reward", "mean": 1.0,
            "standard_error": 0.0, "seeds": 2} in tree["differences"]
    assert {"cpu", "cores", "memory_gib"} <= tree["machine"].keys()
    assert {"python", "torch", "numpy"} <= tree["versions"].keys()
    assert [run["error"] for run in tree["runs"]].count(None) == 7


@pytest.mark.parametrize("axes", [{"rate": ABLATION["axes"]["rate"]}, ABLATION["axes"], ABLATION["axes"] | THIRD],
                         ids=["one", "two", "three"])
def test_pictures_show_something_whatever_the_axes(axes: dict[str, Any], tmp_path: Path) -> None:
    ablation = made(axes=axes)
    pictures = draw(tmp_path, ablation, ended(ablation))
    assert [path.name for path in pictures] == ["curves.png", "reward.png"]  # nothing has a held-out reward
    for path in pictures:
        pixels = imread(path)
        assert len(set(map(tuple, pixels.reshape(-1, pixels.shape[-1])[::7]))) > 10, "an empty picture"


ODD = {"$a_{$": {"kind": "points", "points": {"$x$": {}, "a|b": {}, "_under": {}, r"\\$": {}}},
       "other": {"kind": "values", "keys": ["a.b"], "values": ["$\\frac$", "_low"]}}


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("over", list(ODD))
def test_what_users_write_is_drawn_as_it_stands(over: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.mathtext import MathTextParser

    read: list[str] = []
    parse = MathTextParser.parse
    monkeypatch.setattr(MathTextParser, "parse",
                        lambda parser, text, *rest, **more: read.append(text) or parse(parser, text, *rest, **more))
    seen: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: seen.append(figure) or save(figure, path))
    ablation = made(axes=ODD, over=over, recipe="$r$", report={"$reward$": {"metric": "$m$", "scale": scale}})
    runs = [(run, record, Measured(3, measured.curves, {"$reward$": 1.0 + measured.values["reward"]})) for run, record, measured
            in ended(ablation)]
    draw(tmp_path, ablation, runs)
    assert [text for text in read if "mathdefault" not in text] == []
    (other,) = [axis for axis in ODD if axis != over]
    assert len(seen[-1].axes[0].get_legend().get_texts()) == len(ablation.labels(other))


def test_a_pipe_ends_no_cell(tmp_path: Path) -> None:
    ablation = made(axes=ODD)
    write_table(tmp_path / "table.md", ablation, ended(ablation), name="odd")
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")]
    assert any(r"$a_{$ a\|b" in row for row in rows)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]} == {6}


def test_each_line_of_a_picture_is_a_combination_of_the_other_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: seen.append(figure))
    ablation = made()
    draw(tmp_path, ablation, ended(ablation))
    curves, reward = seen
    assert [panel.get_title() for panel in curves.axes] == ["rate 0.01", "rate 0.02"]
    assert [list(line.get_ydata()) for line in curves.axes[0].lines] == [pytest.approx([0.3, 0.4, 0.5]), pytest.approx([1.3, 1.4, 1.5])]
    (axes,) = reward.axes
    assert [container.get_label() for container in axes.containers] == ["plain", "corrected"]
    assert [list(container[0].get_ydata()) for container in axes.containers] == [[0.5, 1.5], [1.5, 2.5]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.02"]

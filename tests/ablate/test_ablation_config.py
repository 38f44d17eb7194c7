"""What an ablation file may say, and the grid that follows: whatever is wrong is refused before anything starts."""

from __future__ import annotations

import re
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from asyncrl.ablate.command import describe, read_plan
from asyncrl.ablate.config import Ablation, load_ablation
from asyncrl.ablate.grid import points_of
from asyncrl.cli import EXIT_OK, EXIT_USAGE, main
from asyncrl.errors import ConfigError
from asyncrl.recipe_files import ablation_names
from tests.ablate.scene import ABLATION, planned, write
from tests.docs.pages import block_with

RATE, ARM = ABLATION["axes"]["rate"], ABLATION["axes"]["arm"]
QUICK = {"steps": 1, "seeds": [5], "axes": {"rate": ["0.02"]}, "settings": {"buffer.group_size": 4}}


def test_the_grid_is_every_combination_with_every_seed_seeds_outermost(tmp_path: Path) -> None:
    runs = planned(tmp_path, settings={"buffer.group_size": 7}, seed_keys=["run.seed", "prompts.arguments.seed"]).runs
    assert [(run.point["rate"], run.point["arm"], run.seed) for run in runs] == [
        (rate, arm, seed) for seed in (0, 1) for rate in ("0.01", "0.02") for arm in ("plain", "corrected")]
    configs = [run.config for run in runs]
    assert [config.trainer.learning_rate for config in configs] == [0.01, 0.01, 0.02, 0.02] * 2
    assert [config.loss.kind for config in configs] == ["ppo", "decoupled_ppo"] * 4
    assert [getattr(config.correction, "truncate_high", None) for config in configs] == [None, 3.0] * 4
    assert [config.run.seed for config in configs] == [config.prompts.arguments["seed"] for config in configs] == [0] * 4 + [1] * 4
    assert {config.buffer.group_size for config in configs} == {7}
    assert {config.run.steps for config in configs} == {3}
    assert len({run.folder for run in runs}) == len({run.key for run in runs}) == 8
    assert {run.folder.parent for run in runs} == {tmp_path / "out" / "runs"}


def test_several_keys_get_the_same_value_and_a_section_goes_before_what_lies_in_it(tmp_path: Path) -> None:
    lag = {"kind": "values", "keys": ["buffer.policy.lag_steps", "buffer.max_staleness"], "values": [0, 4]}
    settings = {"buffer.policy": {"kind": "fixed_lag", "lag_steps": 0}, "weights.interruption": "drain"}
    runs = planned(tmp_path, axes={"lag": lag}, settings=settings, seeds=[0]).runs
    assert [(run.config.buffer.policy.lag_steps, run.config.buffer.max_staleness) for run in runs] == [(0, 0), (4, 4)]


def test_a_point_goes_over_the_settings_whatever_is_deeper(tmp_path: Path) -> None:
    arms = {"kind": "points", "points": {"wide": {"loss": {"kind": "ppo", "clip_low": 0.5}, "correction": "none"}, "as set": {}}}
    runs = planned(tmp_path, axes={"arm": arms}, settings={"loss.clip_low": 0.1}, seeds=[0]).runs
    assert [run.config.loss.clip_low for run in runs] == [0.5, 0.1]


def test_what_an_ablation_names_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def reward(prompt, completion): return 0.0\n", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, settings={"env.reward": "mine.py:reward"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run, *_) = read_plan(tmp_path / "small.yaml", out=None, quick=False).runs
    assert run.config.env.reward == f"{tmp_path / 'mine.py'}:reward"
    assert run.folder.parent == tmp_path / "elsewhere" / "runs" / "ablations" / "small" / "runs"


def test_the_key_follows_settings_and_sources_and_not_the_place(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def reward(prompt, completion): return 0.0\n", encoding="utf-8")
    file = write(tmp_path, settings={"env.reward": "mine.py:reward"})

    def keys(**changes: Any) -> list[str]:
        write(tmp_path, settings={"env.reward": "mine.py:reward"} | changes)
        return [run.key for run in read_plan(file, out=tmp_path / str(changes), quick=False).runs]

    before = keys()
    assert keys() == before
    assert [run.key for run in read_plan(file, out="another place", quick=False).runs] == before
    assert not set(keys(**{"buffer.group_size": 5})) & set(before)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(source, moved)
    moved_file = write(moved, settings={"env.reward": "mine.py:reward"})
    assert [run.key for run in read_plan(moved_file, out=None, quick=False).runs] == before
    source.write_text("def reward(prompt, completion): return 1.0\n", encoding="utf-8")
    assert not set(keys()) & set(before)


@pytest.mark.parametrize(("changes", "field", "said"), [
    ({"sedes": [1]}, "sedes", "Did you mean 'seeds'"),
    ({"axes": {"rate": RATE | {"value": [1]}}}, "axes.rate.value", "Did you mean 'values'"),
    ({"axes": {"rate": RATE | {"kind": "value"}}}, "axes.rate.kind", "Did you mean 'values'"),
    ({"report": {"reward": {"metric": "reward/total/mean", "stats": "max"}}}, "report.reward.stats", "Did you mean 'stat'"),
    ({"settings": {"trainer.learnig_rate": 0.1}}, "trainer.learnig_rate", "Did you mean 'learning_rate'"),
    ({"axes": {"rate": RATE | {"keys": ["trainer.learnig_rate"]}}}, "trainer.learnig_rate", "This is at rate 0.01"),
    ({"axes": {"rate": RATE | {"values": [0.01, 2.0]}}}, "trainer.learning_rate", "This is at rate 2.0"),
    ({"axes": {"size": {"kind": "values", "keys": ["buffer.groups_per_step"], "values": [2, 3]}},
      "settings": {"trainer.minibatches_per_step": 2}}, "trainer.minibatches_per_step, buffer.groups_per_step", "This is at size 3"),
    ({"axes": {"rate": RATE | {"values": [0.01, 0.01]}}}, "axes.rate", "each once"),
    ({"axes": {"rate": RATE, "again": RATE}}, "axes.rate, axes.again", "make one axis of them"),
    ({"seed_keys": ["run.seed", "trainer.learning_rate"]}, "axes.rate, seed_keys", "in one of the two"),
    ({"axes": {"nothing": {"kind": "points", "points": {"a": {}, "b": {}}}}}, "axes, seed_keys", "nothing a, seed 0; nothing b, seed 0"),
    ({"seeds": [1, 1]}, "seeds", "each once"),
    ({"seeds": []}, "seeds", "at least 1"),
    ({"seed_keys": ["run.rollouts_every_steps"], "seeds": [0]}, "run.rollouts_every_steps", "greater than or equal to 1"),
    ({"axes": {}}, "axes", "at least 1"),
    ({"over": "rat"}, "over", "Did you mean 'rate'"),
    ({"reference": {"arn": "plain"}}, "reference", "Did you mean 'arm'"),
    ({"reference": {"arm": "plane"}}, "reference.arm", "Did you mean 'plain'"),
    ({"quick": {"axes": {"arm": ["plane"]}}}, "quick.axes.arm", "Did you mean 'plain'"),
    ({"settings": {"run.name": "mine"}}, "settings", "names its runs"),
    ({"settings": {"run.steps": 5}}, "settings", "use `steps`"),
    ({"quick": {"settings": {"run.folder": "there"}}}, "quick.settings", "use --out"),
    ({"settings": {"trainer..x": 1}}, "settings", "section.key"),
    ({"recipe": "arithmetic/quickstrat"}, "recipe", "Did you mean 'arithmetic/quickstart'"),
    ({"timeout_s": 0.0}, "timeout_s", "greater than 0"),
    ({"axes": {f"axis {number}": {"kind": "values", "keys": [f"prompts.arguments.n{number}"], "values": list(range(100))}
               for number in range(6)}}, "axes, seeds", "2000000000000 is not allowed: at most 10000 runs"),
    ({"settings": {"run": {"steps": 9}}}, "settings", "Write run.KEY"),
    ({"quick": {"settings": {"run": {"seed": 9}}}}, "quick.settings", "Write run.KEY"),
    ({"axes": {"arm": {"kind": "points", "points": {"a": {"run": {"name": "mine"}}}}}}, "axes", "Write run.KEY"),
    ({"seed_keys": ["run"]}, "seed_keys", "Write run.KEY"),
    ({"settings": {"run.name.first": "mine"}}, "settings", "names its runs"),
    ({"axes": {"arm": {"kind": "points", "points": {"a": {"run.steps.x": 1}}}}}, "axes", "use `steps`"),
    ({"settings": {"run.seed": 4}}, "settings, seed_keys", "in one of the two"),
    ({"settings": {"prompts.arguments": {"x": float("nan")}}}, "settings", "results.json holds them"),
    ({"axes": {"arm": {"kind": "points", "points": {"a": {"prompts.arguments": {"x": date(2001, 1, 1)}}}}}}, "axes.arm", "finite"),
    ({"quick": {"axes": {"rate": []}}}, "quick.axes.rate", "at least 1"),
    ({"axes": {"arm": {"kind": "points", "points": {"one\ntwo": {}}}}}, "axes.arm", "ends of lines"),
    ({"axes": {"text": {"kind": "values", "keys": ["prompts.arguments.text"], "values": ["a\x07"]}}}, "axes.text", "control characters"),
    ({"axes": {"text": {"kind": "values", "keys": ["prompts.arguments.text"], "values": [""]}}}, "axes.text", "not empty"),
    ({"axes": {"a\u2028b": RATE}}, "axes", "ends of lines"),
    ({"report": {"a\nb": {"metric": "m"}}}, "report", "ends of lines"),
    ({"report": {"Curves": {"metric": "m"}}}, "report", "not that of the curve"),
    ({"report": {"a b": {"metric": "m"}, "A?b": {"metric": "m"}}}, "report", "a_b.png, is not that of 'a b'"),
    ({"report": {"x" * 300: {"metric": "m"}}}, "report", "at most 200 bytes"),
    ({"report": {"?!": {"metric": "m"}}}, "report", "letters or digits"),
    ({"axes": {"deep": {"kind": "values", "keys": [".".join("x" * 3000)], "values": [1]}}}, "settings", "section.key"),
    ({"recipe": "x" * 300}, "recipe", "an existing YAML file"),
])
def test_what_cannot_work_is_refused_with_its_place(changes: dict[str, Any], field: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, **changes)
    assert caught.value.field == field
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["a file", "a file/below", "x" * 300, "long/" * 700], ids=["file", "below", "long name", "long path"])
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "run"])
def test_a_folder_that_cannot_be_made_is_refused(out: str, dry: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").write_text("mine", encoding="utf-8")
    assert main(["ablate", str(write(tmp_path)), *dry, "--out", str(tmp_path / out)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("asyncrl: --out = ")
    assert (tmp_path / "a file").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_turns_out_not_to_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(write(tmp_path)), "--out", "/proc/nowhere"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("asyncrl: --out = '/proc/nowhere'")


def test_no_jobs_are_refused_in_a_dry_run_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(write(tmp_path)), "--dry-run", "--jobs", "0"]) == EXIT_USAGE
    assert "--jobs = 0 is not allowed" in capsys.readouterr().err


def test_a_name_of_any_letters_fits_a_file_system(tmp_path: Path) -> None:
    axes = {"text": {"kind": "values", "keys": ["prompts.arguments.text"], "values": ["\U00020000" * 200]}}
    (run,) = planned(tmp_path, axes=axes, seeds=[0]).runs
    assert len(run.folder.name.encode()) < 100


def test_steps_may_be_an_axis(tmp_path: Path) -> None:
    axes = {"length": {"kind": "values", "keys": ["run.steps"], "values": [2, 9]}}
    assert [run.config.run.steps for run in planned(tmp_path, axes=axes, seeds=[0]).runs] == [2, 9]


def test_the_quick_profile_has_fewer_points_and_settings_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, quick=QUICK, reference={"rate": "0.01"})
    plan = read_plan(file, out=None, quick=True)
    assert [(run.point["rate"], run.point["arm"], run.seed) for run in plan.runs] == [("0.02", "plain", 5), ("0.02", "corrected", 5)]
    assert {(run.config.run.steps, run.config.buffer.group_size) for run in plan.runs} == {(1, 4)}
    assert plan.ablation.reference_of("rate") == "0.02"
    assert (plan.profile, plan.folder) == ("quick", Path("runs/ablations/small-quick"))


def test_a_file_without_a_quick_profile_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quick.*leave --quick out"):
        read_plan(write(tmp_path), out=None, quick=True)


def test_labels_are_values_as_yaml_writes_them() -> None:
    tree = ABLATION | {"axes": {"mixed": {"kind": "values", "keys": ["a.b"], "values": [1, 0.5, 1e-05, True, None, "text"]}}}
    ablation = Ablation.model_validate(tree)
    assert ablation.labels("mixed") == ["1", "0.5", "1e-05", "true", "null", "text"]
    assert [point["mixed"] for point in points_of(ablation)] == ablation.labels("mixed")


@pytest.mark.parametrize("name", ablation_names())
@pytest.mark.parametrize("quick", [False, True])
def test_every_shipped_ablation_can_be_run(name: str, quick: bool) -> None:
    plan = read_plan(name, out=None, quick=quick)
    assert len(plan.runs) == len(points_of(plan.ablation)) * len(plan.ablation.seeds) > 1
    assert load_ablation(f"recipes/{name}.yaml")[0] == load_ablation(name)[0]


def test_a_dry_run_prints_the_grid_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(write(tmp_path)), "--dry-run", "--out", str(tmp_path / "out")]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small, profile full: base, 3 steps, 4 points × 2 seeds"
    assert lines[1] == "  rate 0.01, arm plain: trainer.learning_rate=0.01 loss.kind=ppo correction=none"
    assert lines[-1] == f"8 runs, 0 of them finished before; in {tmp_path / 'out'}"
    assert not (tmp_path / "out").exists()
    assert describe(planned(tmp_path)).splitlines() == lines


def test_a_missing_file_is_shown_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "ablations/stalenes", "--dry-run"]) == EXIT_USAGE
    assert "Did you mean 'ablations/staleness'?" in capsys.readouterr().err


def test_the_file_on_the_page_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(block_with("ablations.md", "recipe: arithmetic/quickstart"), encoding="utf-8")
    runs = read_plan(tmp_path / "shown.yaml", out=tmp_path, quick=False).runs
    assert [(run.config.buffer.policy.lag_steps, run.config.loss.kind) for run in runs[:4]] == [
        (0, "ppo"), (0, "decoupled_ppo"), (4, "ppo"), (4, "decoupled_ppo")]


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ablations.md").read_text(encoding="utf-8")
    table = page.split("| key | default | meaning |")[1].split("\n\n")[0]
    assert {key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])} == set(Ablation.model_fields)

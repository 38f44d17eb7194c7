"""What healthy means, in one table: printed, marked by, and shown in the documentation."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from asyncrl.config import dump_config, load_config
from asyncrl.observe.health import BY_METRIC, QUANTITIES, WIDTH, RunSettings, dead_group_rate, markdown, table
from tests.observe.rows import METRICS, SETTINGS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


@pytest.mark.parametrize("settings", [SETTINGS, dataclasses.replace(SETTINGS, staleness_bound=math.inf, probe_limit=0.0123456),
                                      dataclasses.replace(SETTINGS, max_staleness=10**6, staleness_bound=1e6, group_size=1024)])
def test_the_table_fits_80_columns_and_gives_each_quantity_two_lines(settings):
    lines = table(settings)
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 2 * len(QUANTITIES) + 4


def test_the_table_says_that_a_loss_near_0_is_normal():
    assert any(line.startswith("loss") and "near 0 is normal" in line for line in table(SETTINGS))


def test_the_table_says_how_many_groups_will_carry_no_gradient():
    text = " ".join(table(dataclasses.replace(SETTINGS, group_size=2)))
    assert "dead groups to expect of 2 rollouts, by pass rate: 96% at 0.02" in text
    assert "50% at 0.5" in text


@pytest.mark.parametrize(("pass_rate", "group_size", "rate"), [(0.2, 2, 0.68), (0.5, 4, 0.125), (0.0, 8, 1.0), (0.5, 1, 1.0)])
def test_dead_groups_are_those_that_all_pass_or_all_fail(pass_rate, group_size, rate):
    assert dead_group_rate(pass_rate, group_size=group_size) == pytest.approx(rate)


def test_an_ordinary_step_is_healthy():
    assert [quantity.title for quantity in QUANTITIES
            if quantity.metric in METRICS and not quantity.is_healthy(METRICS[quantity.metric], SETTINGS)] == []


@pytest.mark.parametrize(("metric", "value", "healthy"), [
    ("staleness/token/max", 2, True), ("staleness/token/max", 3, False), ("probe/gap/mean", 0.01, True), ("probe/gap/mean", 0.011, False),
    ("correction/ess/frac", 0.49, False), ("train/loss/mean", 0.0, True), ("train/loss/mean", math.nan, False),
    ("train/grad_norm/last", math.inf, False), ("rollout/errors/sum", 1, False), ("buffer/length_bias/last", 0.8, False)])
def test_bounds_are_inclusive_and_nothing_infinite_is_healthy(metric, value, healthy):
    assert BY_METRIC[metric].is_healthy(value, SETTINGS) is healthy


def test_a_bound_on_the_mean_alone_does_not_judge_the_oldest_token():
    soft = dataclasses.replace(SETTINGS, staleness_bound=math.inf)
    assert BY_METRIC["staleness/token/max"].is_healthy(50, soft)
    assert not BY_METRIC["staleness/token/mean"].is_healthy(2.5, soft)


def test_the_settings_are_those_of_the_file_a_run_writes():
    import yaml

    config = load_config(ROOT / "recipes" / "arithmetic" / "quickstart.yaml", ["buffer.policy={kind: soft}"])
    settings = RunSettings.of(yaml.safe_load(dump_config(config)))
    assert settings == RunSettings(name="quickstart", steps=100, max_staleness=2, staleness_bound=math.inf, group_size=16, probe_limit=0.02)


def test_the_documentation_has_the_same_table():
    assert markdown() in PAGE.read_text(encoding="utf-8")


def test_the_documentation_names_every_metric_that_is_recorded():
    page = PAGE.read_text(encoding="utf-8")
    calls = re.compile(r"""(?:metrics|bag|taken)\.(?:mean|sum|last|max|min)\(\s*f?"(?P<name>[^"]+/[^"]+)\"""")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "asyncrl").rglob("*.py")]
    names = {match["name"] for source in sources for match in calls.finditer(source)}
    assert len(names) > 40
    shown = re.findall(r"`([^`]+/[^`]+)`", page)
    patterns = {name: re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(name))) for name in names if not name.startswith("correction/")}
    assert sorted(name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, shown))) == []

"""The tracker may raise, block or be strict about steps: the run goes on, and what was not written is counted."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest

from asyncrl.errors import ConfigError
from asyncrl.observe.wandb_writer import WandbWriter

BOUND_S = 20.0


class StrictRun:
    """Keeps the step of its log calls monotonic, as wandb does: a row with a smaller explicit step is lost."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.axes: dict[str, str | None] = {}
        self.finished = False
        self._step = 0

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, row, step=None):
        if step is not None and step < self._step:
            return
        self._step = self._step + 1 if step is None else step
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A wandb module; set `wandb.run` or replace `wandb.init`."""
    module = ModuleType("wandb")
    module.run, module.settings = StrictRun(), {}

    def init(**settings):
        module.settings = settings
        return module.run
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return module


def writer(tmp_path, **settings) -> WandbWriter:
    return WandbWriter(project="p", name="n", run_id="r1", config={"a": 1}, folder=tmp_path, **settings)


def test_no_row_is_lost_to_a_late_evaluation_or_an_older_step(wandb, tmp_path):
    out = writer(tmp_path)
    rows = [{"trainer_step": 5, "train/loss/mean": 0.5}, {"trainer_step": 6, "train/loss/mean": 0.4},
            {"eval_version": 3, "eval/held_out/reward/mean": 0.7},
            {"trainer_step": 2, "train/loss/mean": 0.9}]  # the last one comes from a resumed run
    for row in rows:
        out.write(row)
    out.close()
    assert wandb.run.rows == rows
    assert wandb.run.axes == {"trainer_step": None, "eval_version": None, "eval/*": "eval_version", "*": "trainer_step"}
    assert (out.dropped, out.error, wandb.run.finished) == (0, "", True)


@pytest.mark.parametrize(("environment", "mode"), [({}, "offline"), ({"WANDB_API_KEY": "k"}, "online"),
                                                   ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "disabled")])
def test_the_tracker_is_offline_without_a_key(wandb, tmp_path, monkeypatch, environment, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    writer(tmp_path).close()
    assert wandb.settings == {"project": "p", "name": "n", "id": "r1", "resume": "allow", "config": {"a": 1}, "dir": str(tmp_path),
                              "mode": mode}


def test_a_row_that_raises_is_counted_and_the_next_one_is_written(wandb, tmp_path):
    def log(row):
        if row["trainer_step"] == 2:
            raise OSError("disk quota")
        StrictRun.log(wandb.run, row)
    wandb.run.log = log
    out = writer(tmp_path)
    for step in (1, 2, 3):
        out.write({"trainer_step": step})
    out.close()
    assert wandb.run.rows == [{"trainer_step": 1}, {"trainer_step": 3}]
    assert (out.dropped, out.error) == (1, "OSError: disk quota")


def test_a_tracker_that_cannot_start_costs_its_rows_alone(wandb, tmp_path):
    def init(**settings):
        raise RuntimeError("no network")
    wandb.init = init
    out = writer(tmp_path)
    for step in range(4):
        out.write({"trainer_step": step})
    out.close()
    assert (out.dropped, out.error) == (4, "RuntimeError: no network")


def test_a_finish_that_raises_is_noted(wandb, tmp_path):
    def finish():
        raise ConnectionError("gone")
    wandb.run.finish = finish
    out = writer(tmp_path)
    out.write({"trainer_step": 1})
    out.close()
    assert (out.dropped, out.error) == (0, "ConnectionError: gone")


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_tracker_that_blocks_never_blocks_the_run(wandb, tmp_path, where):
    entered, release = threading.Event(), threading.Event()

    def block(*_, **__):
        entered.set()
        release.wait(BOUND_S)
        return wandb.run
    setattr(wandb if where == "init" else wandb.run, where, block)
    out = writer(tmp_path, capacity_rows=3)
    try:
        out.write({"trainer_step": 0})
        assert entered.wait(BOUND_S)
        for step in range(1, 11):
            out.write({"trainer_step": step})
        out.close(timeout_s=0.0)
        assert out.dropped == 11
        assert out.error == "3 rows wait for the tracker"
    finally:
        release.set()
    out.close(timeout_s=BOUND_S)  # for the test alone: what waited is written once the tracker moves again
    assert out.dropped == 11 - (3 if where == "init" else 4)


def test_wandb_that_is_not_installed_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        writer(tmp_path)


def test_a_stored_login_is_as_good_as_a_key(wandb, tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n", encoding="utf-8")
    (tmp_path / ".netrc").chmod(0o600)
    writer(tmp_path).close()
    assert wandb.settings["mode"] == "online"

"""What `--dry-run` tells: a configuration that loads again, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import dump_config, load_config
from asyncrl.dry_run import describe

DRAIN = "weights.interruption=drain"


def told(*settings: str) -> dict[str, str]:
    """The comments, by what they speak of."""
    lines = [line.removeprefix("#").strip() for line in describe(load_config("arithmetic/quickstart", settings)).splitlines()
             if line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def test_what_is_told_is_a_recipe(tmp_path: Path) -> None:
    config = load_config("arithmetic/quickstart", ["run.steps=7"])
    text = describe(config)
    assert text.startswith(dump_config(config))
    (tmp_path / "again.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


def test_the_quantities_of_the_quickstart() -> None:
    lines = told()
    assert lines["batch"] == "32 groups of 16, 512 rollouts, at most 2,048 sampled tokens"
    assert lines["updates"] == "1 update a step, 32 groups each (minibatches 1 × epochs 1)"
    assert lines["correction"] == "weight min(r, 2) with r = proximal / rollout; kept: all"
    assert lines["proximal logprobs"] == "those of the forward that trains, without one of their own"
    assert lines["staleness"] == "at most K = 2 steps; window W = 10"
    assert lines["capacity"] == "B = 87 groups held at once; depth: 32 to 87, 64 at first"
    assert lines["in all"] == "100 steps, 100 updates, 51,200 rollouts; fewer if the prompts end"
    assert lines["learning rate"] == "6e-05 in step 1, 0.0006 in step 10, 0.000185 in step 100"
    assert lines["versions the engines get"] == "0, 1, 2 … 100"
    assert lines["evaluations"] == "after steps 0, 25, 50, 75, 100; 256 rollouts each"
    assert lines["parity probes"] == "before steps 1, 51"
    assert lines["checkpoints"] == "after steps 20, 40, 60, 80, 100"
    assert lines["folder"] == str(Path("runs/quickstart").absolute())
    assert lines["trainer"].startswith("1 child")


@pytest.mark.parametrize(("settings", "name", "line"), [
    (["trainer.minibatches_per_step=4", "trainer.epochs=2"], "updates", "8 updates a step, 8 groups each (minibatches 4 × epochs 2)"),
    (["trainer.minibatches_per_step=4", "trainer.epochs=2"], "in all", "100 steps, 800 updates, 51,200 rollouts; fewer if the prompts end"),
    (["trainer.epochs=2"], "proximal logprobs", "of a forward over the batch, before its first update"),
    (["correction={kind: custom, proximal: log_linear}", "trainer.epochs=2"], "proximal logprobs",
     "guessed between rollout and current ones, without a forward of their own"),
    (["correction={kind: custom, level: sequence, reduce: mean, truncate_high: 2, denominator: kept, reject: [{kind: veto}]}"],
     "correction",
     "weight min(geometric mean of r over the sequence, 2) with r = proximal / rollout; kept and divided by: "
     "0.0001 ≤ smallest r of the sequence"),
    (["reference={kind: in_loss, coefficient: 0.01}"], "reference",
     "the initial model, a forward over the batch a step; KL in the loss, k3_importance, times 0.01"),
    (["reference={kind: in_reward, coefficient: 0.01}"], "reference",
     "the initial model, a forward over the batch a step; KL in the reward, times 0.01"),
    (["advantages={kind: gae, critic: {epochs: 2}}", "trainer.minibatches_per_step=4"], "critic",
     "a model of its own, a forward over the batch and 8 updates a step"),
    (["advantages={kind: gae, critic: {warm_up_steps: 5}}"], "critic",
     "a model of its own, a forward over the batch and 1 update a step; alone in the first 5 steps"),
    (["correction=icepop"], "correction", "weight r with r = proximal / rollout; kept: 0.5 ≤ r ≤ 5"),
    (["buffer.policy=soft"], "staleness", "K = 2 steps in the mean, more for single tokens"),
    (["buffer.policy=soft"], "capacity", "B = 96 groups held at once; depth: 32 to 96, 64 at first"),
    (["buffer.policy={kind: fixed_lag, lag_steps: 1}", DRAIN], "staleness", "exactly 1 steps"),
    (["buffer.policy={kind: fixed_lag, lag_steps: 1}", DRAIN], "capacity", "B = 64 groups held at once; depth: 64"),
    (["buffer.depth_groups=40"], "capacity", "B = 87 groups held at once; depth: 40"),
    (["weights.publish_every_steps=2", "eval.every_steps=50"], "versions the engines get", "0, 2, 4 … 100"),
    (["weights.publish_every_steps=3", "eval.kind=none"], "parity probes", "before steps 1, 52"),
    (["eval.kind=none"], "evaluations", "none"),
    (["run.steps=60"], "evaluations", "after steps 0, 25, 50, 60; 256 rollouts each"),
    (["trainer.checkpoint_every_steps=null"], "checkpoints", "after steps 100"),
    (["run.steps=1000000"], "checkpoints", "after steps 20, 40, 60 … 1000000"),
    (["trainer.schedule=constant"], "learning rate", "0.0006 in step 1, 0.0006 in step 100"),
    (["trainer.schedule={kind: cosine, total_steps: 50}"], "learning rate", "0.0006 in step 1, 5.92e-07 in step 50, 0 in step 100"),
    (["run.steps=1"], "learning rate", "6e-05 in step 1")])
def test_what_a_setting_changes(settings: list[str], name: str, line: str) -> None:
    assert told(*settings)[name] == line

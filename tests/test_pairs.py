"""Settings that are wrong together are refused when they are read: both are named, and nothing that is right is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError

LAG = "buffer.policy={kind: fixed_lag, lag_steps: 1}"
WINDOW = "buffer.window, buffer.max_staleness, weights.publish_every_steps"
RANKS = "trainer.processes, trainer.minibatches_per_step, buffer.groups_per_step, buffer.group_size"
NEVER = "advantages.overlong.max_tokens, advantages.overlong.cache_tokens, sampling.max_new_tokens"
TURNS = "colocation.kind, buffer.policy.kind, buffer.max_staleness"
STALE = "run.deterministic, buffer.policy.kind, buffer.max_staleness"
REFUSED: list[tuple[list[str], str]] = [
    (["correction=null"], "correction, buffer.max_staleness"),
    (["correction=null", "buffer.max_staleness=0", "buffer.policy=soft"], "correction, buffer.max_staleness"),
    ([LAG], "weights.interruption, buffer.policy.kind"),
    (["buffer.group_size=1"], "buffer.group_size, advantages.kind"),
    (["buffer.group_size=1", "advantages=reinforce_plus_plus_baseline"], "buffer.group_size, advantages.kind"),
    (["advantages.overlong={kind: soft, max_tokens: 4, cache_tokens: 5}"],
     "advantages.overlong.max_tokens, advantages.overlong.cache_tokens"),
    (["sampling.max_new_tokens=6", "advantages.overlong={kind: soft, max_tokens: 8, cache_tokens: 2}"], NEVER),
    (["advantages={kind: gae, critic: {warm_up_steps: 100}}"], "advantages.critic.warm_up_steps, run.steps"),
    (["trainer.minibatches_per_step=5"], "trainer.minibatches_per_step, buffer.groups_per_step"),
    (["trainer.minibatches_per_step=64"], "trainer.minibatches_per_step, buffer.groups_per_step"),
    (["trainer.processes=3", "buffer.groups_per_step=1", "buffer.group_size=2"], RANKS),
    (["trainer.processes=17", "trainer.minibatches_per_step=32"], RANKS),
    (["buffer.window=66"], WINDOW), (["weights.publish_every_steps=4", "eval.kind=none"], WINDOW),
    (["buffer.window=2", "buffer.policy=soft"], "buffer.window, buffer.policy.kind"),
    (["buffer.depth_groups=88"], "buffer.depth_groups, buffer.groups_per_step, buffer.max_staleness"),
    (["buffer.zero_variance=keep", "buffer.max_empty_fills=3"], "buffer.max_empty_fills, buffer.zero_variance"),
    (["sampling.stop=[x]"], "sampling.stop"), (["engine.kind=inline", "sampling.stop=[x]"], "sampling.stop"),
    (["engine.kind=vllm", "sampling.temperature=0.001"], "sampling.temperature"),
    (["engine.context_tokens=4"], "sampling.max_new_tokens, engine.context_tokens"),
    (["engine.kv_cache_tokens=256", "sampling.max_new_tokens=256"], "sampling.max_new_tokens, engine.context_tokens"),
    (["engine.kv_cache_tokens=256", "engine.context_tokens=257"], "engine.context_tokens, engine.kv_cache_tokens"),
    (["engine.kind=vllm", "engine.max_batch_tokens=16"], "engine.max_batch_tokens, engine.max_running_requests"),
    (["engine.dtype=bfloat16"], "weights.dtype, engine.dtype"),
    (["env.timeout_s=1800"], "env.timeout_s, buffer.stall_timeout_s"),
    (["env.timeout_s=900", "env.reward={a: 'math:sqrt', b: 'math:exp'}"], "env.timeout_s, buffer.stall_timeout_s"),
    (["eval.sets.held_out.env.timeout_s=1800"], "eval.sets.held_out.env.timeout_s, buffer.stall_timeout_s"),
    (["weights.drain_timeout_s=5"], "weights.drain_timeout_s, weights.interruption"),
    (["trainer.processes=0", "trainer.max_restarts=1"], "trainer.max_restarts, trainer.processes"),
    (["trainer.processes=0", "trainer.start_timeout_s=9"], "trainer.start_timeout_s, trainer.processes"),
    (["trainer.processes=0", "trainer.step_timeout_s=9"], "trainer.step_timeout_s, trainer.processes"),
    (["trainer.processes=0", "trainer.dtype=bfloat16"], "trainer.dtype, trainer.processes"),
    (["trainer.schedule={kind: linear, total_steps: 5, warm_up_steps: 5}"],
     "trainer.schedule.warm_up_steps, trainer.schedule.total_steps"),
    (["correction={kind: icepop, mask_low: 5}"], "correction.mask_low, correction.mask_high"),
    (["correction.truncate_high=1e9"], "correction.truncate_high"),
    (["run.deterministic=true"], STALE), (["run.deterministic=true", "buffer.max_staleness=0", "buffer.policy=soft"], STALE),
    (["run.deterministic=true", "buffer.max_staleness=0"], "run.deterministic, engine.kind"),
    (["run.deterministic=true", "buffer.max_staleness=0", "engine.kind=vllm"], "run.deterministic, engine.kind"),
    (["run.deterministic=true", "buffer.max_staleness=0", "engine.kind=inline", "prompts.curriculum={kind: pass_rate}"],
     "run.deterministic, prompts.curriculum"),
    (["colocation.kind=turns"], TURNS), (["colocation.kind=turns", "buffer.max_staleness=0", "buffer.policy=soft"], TURNS),
    (["colocation.kind=turns", "buffer.max_staleness=0", "weights.anchor_every_versions=2"],
     "colocation.kind, weights.anchor_every_versions"),
    (["colocation.kind=turns", "buffer.max_staleness=0", "engine.kind=vllm"], "colocation.kind, engine.kind"),
    (["loss.kind=ppo"], "loss.kind, correction.kind"), (["loss.max_tokens=4"], "loss.aggregation, loss.max_tokens")]
ACCEPTED: list[list[str]] = [
    ["buffer.group_size=1", "advantages=reinforce_plus_plus"], ["buffer.group_size=1", "advantages=gae"],
    ["sampling.max_new_tokens=6", "advantages.overlong={kind: soft, max_tokens: 8, cache_tokens: 3}"],
    ["run.deterministic=true", "engine.kind=inline", "buffer.max_staleness=0"],
    ["run.deterministic=true", "engine.kind=inline", LAG, "weights.interruption=drain"],
    ["colocation.kind=turns", "buffer.max_staleness=0"], ["colocation.kind=turns", LAG, "weights.interruption=drain"],
    ["correction=null", "buffer.max_staleness=0"], [LAG, "weights.interruption=drain", "weights.drain_timeout_s=5"],
    ["trainer.minibatches_per_step=32"], ["trainer.processes=16", "trainer.minibatches_per_step=32"], ["buffer.window=65"],
    ["weights.publish_every_steps=3", "eval.kind=none"], ["buffer.depth_groups=87"], ["buffer.depth_groups=32"],
    ["engine.kind=vllm", "sampling.stop=[x]", "sampling.temperature=0.01"], ["engine.context_tokens=5"],
    ["engine.dtype=bfloat16", "weights.dtype=bfloat16"], ["weights.dtype=bfloat16"], ["env.timeout_s=1799"],
    ["env.timeout_s=899", "env.reward={a: 'math:sqrt', b: 'math:exp'}"],
    ["trainer.processes=0", "trainer.checkpoint_every_steps=5", "trainer.threads=2"],
    ["trainer.schedule={kind: linear, total_steps: 5, warm_up_steps: 4}"],
    ["trainer.schedule={kind: cosine, total_steps: 5}", "run.steps=9"],
    ["trainer.checkpoint_every_steps=500"], ["run.probe.every_steps=500"], ["eval.every_steps=500"]]


def shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else ""


@pytest.mark.parametrize(("settings", "fields"), REFUSED, ids=shown)
def test_what_cannot_work_together_is_refused_with_both_names(settings: list[str], fields: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("arithmetic/quickstart", settings)
    assert caught.value.field == fields
    assert caught.value.allowed
    assert caught.value.remedy


@pytest.mark.parametrize("settings", ACCEPTED, ids=shown)
def test_what_works_together_is_not_refused(settings: list[str]) -> None:
    load_config("arithmetic/quickstart", settings)


def test_a_default_is_no_dead_option() -> None:
    config = load_config("arithmetic/quickstart", ["trainer.processes=0", "trainer.max_restarts=3", "weights.drain_timeout_s=600"])
    assert config.trainer.max_restarts == 3


def test_a_penalty_on_length_may_be_for_one_source_alone() -> None:
    soft = "advantages.overlong={kind: soft, max_tokens: 9, cache_tokens: 4}"
    load_config("arithmetic/mixture", [soft, "prompts.sources.differences.sampling.max_new_tokens=6"])
    with pytest.raises(ConfigError) as caught:
        load_config("arithmetic/mixture", [soft])
    assert caught.value.field == NEVER


def test_the_name_of_a_source_is_one_part_of_a_metrics_name() -> None:
    with pytest.raises(ConfigError, match=r"^prompts\.sources = 'eval/held_out'"):
        load_config("arithmetic/mixture", ["prompts.sources={eval/held_out: {kind: jsonl, path: rows.jsonl}}"])

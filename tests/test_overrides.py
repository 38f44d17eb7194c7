"""What `section.key=value` does to a tree: one value each, and nothing is lost without a word."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.overrides import apply_overrides, parse_overrides

TREE: dict[str, Any] = {
    "engine": {"kind": "transformers", "max_batch_tokens": 64, "kv_cache_tokens": 512, "dtype": "bfloat16"},
    "loss": "decoupled_ppo",
    "trainer": {"learning_rate": 1e-3, "schedule": {"kind": "linear", "total_steps": 9, "warm_up_steps": 2}},
    "env": {"kind": "single_turn", "reward": {"form": "a:b", "sum": "a:c"}},
    "prompts": {"kind": "function", "function": "a:b", "arguments": {"seed": 1, "level": 2}},
}

GONE = "is set, so the recipe's own settings there do not apply: engine.max_batch_tokens=64, engine.kv_cache_tokens=512"


def changed(*texts: str) -> tuple[dict[str, Any], list[str]]:
    tree = copy.deepcopy(TREE)
    return tree, apply_overrides(tree, parse_overrides(texts), root=RunConfig)


def test_another_kind_keeps_what_it_has_in_common_and_says_what_goes() -> None:
    tree, lost = changed("engine.kind=inline")
    assert tree["engine"] == {"kind": "inline", "dtype": "bfloat16"}
    assert lost == [f"engine.kind {GONE}"]


def test_another_kind_that_has_all_loses_nothing() -> None:
    tree, lost = changed("trainer.schedule.kind=cosine")
    assert tree["trainer"]["schedule"] == {"kind": "cosine", "total_steps": 9, "warm_up_steps": 2}
    assert lost == []


def test_the_same_kind_changes_nothing() -> None:
    assert changed("engine.kind=transformers") == (TREE, [])


def test_what_the_command_line_gives_the_new_kind_is_never_dropped() -> None:
    tree, _ = changed("engine.max_batch_tokens=32", "engine.kind=inline")
    assert tree["engine"]["max_batch_tokens"] == 32, "validation refuses it; dropping it would be silent"


def test_a_misspelt_key_stays_to_be_refused() -> None:
    tree = {"engine": {"kind": "transformers", "max_batch_token": 1}}
    assert apply_overrides(tree, parse_overrides(["engine.kind=inline"]), root=RunConfig) == []
    assert tree["engine"]["max_batch_token"] == 1


@pytest.mark.parametrize("kind", ["inlin", "3", "null", "[inline]", "{a: 1}"])
def test_an_unknown_kind_drops_nothing(kind: str) -> None:
    tree, lost = changed(f"engine.kind={kind}")
    assert {**tree["engine"], "kind": "transformers"} == TREE["engine"]
    assert lost == []


def test_a_whole_section_replaces_the_recipe_s_and_says_so() -> None:
    tree, lost = changed("engine={kind: inline, dtype: float32}")
    assert tree["engine"] == {"kind": "inline", "dtype": "float32"}
    assert lost == [f"engine {GONE}"]
    assert changed("trainer.schedule=constant")[1]


def test_a_value_that_is_a_mapping_is_replaced_without_a_word() -> None:
    tree, lost = changed("env.reward=a:d", "prompts.arguments={seed: 2}")
    assert tree["env"]["reward"] == "a:d"
    assert tree["prompts"]["arguments"] == {"seed": 2}
    assert lost == []


def test_the_order_of_overrides_does_not_matter() -> None:
    texts = ("engine={kind: vllm}", "engine.threads=4", "engine.kind=inline", "run.steps=3")
    trees = [changed(*order)[0] for order in itertools.permutations(texts)]
    assert all(tree == trees[0] for tree in trees)
    assert trees[0]["engine"] == {"kind": "inline", "threads": 4}


def test_a_key_below_a_kind_written_alone_makes_it_a_section() -> None:
    tree, _ = changed("loss.clip_low=0.1")
    assert tree["loss"] == {"kind": "decoupled_ppo", "clip_low": 0.1}


def test_a_section_that_is_not_there_is_made() -> None:
    assert changed("run.probe.every_steps=3")[0]["run"] == {"probe": {"every_steps": 3}}


def test_a_section_with_a_name_of_the_user_s_own_is_there_or_given_whole() -> None:
    tree = {"eval": {"kind": "sets", "sets": {"sums": {"limit": 3}}}}

    def set_to(text: str) -> None:
        apply_overrides(tree, parse_overrides([text]), root=RunConfig)

    set_to("eval.sets.sums.limit=4")
    set_to("eval.sets.words={prompts: a}")
    assert tree["eval"]["sets"] == {"sums": {"limit": 4}, "words": {"prompts": "a"}}
    with pytest.raises(ConfigError, match=r"eval\.sets\.sumz\.limit.*Did you mean 'sums'"):
        set_to("eval.sets.sumz.limit=3")
    with pytest.raises(ConfigError, match=r"Give the whole of it: eval\.sets\.other="):
        set_to("eval.sets.other.limit=3")


@pytest.mark.parametrize("texts", [("run.steps=1", "run.steps=1"), ("run.steps=1", "run.seed=2", "run.steps=3")])
def test_a_key_given_twice_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"run\.steps.*each key once"):
        parse_overrides(texts)


@pytest.mark.parametrize("text", ["env.reward.form.more=a:b", "trainer.learning_rate.high=1"])
def test_a_path_through_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a path through sections"):
        changed(text)

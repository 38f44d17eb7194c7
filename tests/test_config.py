"""The configuration: strict, readable in its refusals, the same after a round trip, and free of torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import yaml_text
from asyncrl.config import RunConfig, dump_config, load_config, parse_config
from asyncrl.correction import presets
from asyncrl.errors import ConfigError
from asyncrl.settings import kinds_of, members_of
from asyncrl.train.loss_config import LossConfig

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic" / "quickstart.yaml"
TASK = RECIPE.parent / "task.py"
TEXT = f"""
model: {{kind: function, function: '{TASK}:tiny_qwen3'}}
warm_up: {{kind: cross_entropy, examples: '{TASK}:worked_sums', held_out: '{TASK}:held_out_examples', until_accuracy: 0.3,
          arguments: {{noise: 3e-1}}}}
prompts: {{kind: function, function: '{TASK}:sums', arguments: {{seed: 0}}}}
engine: {{kind: transformers}}
sampling: {{max_new_tokens: 4}}
env: {{kind: single_turn, reward: '{TASK}:is_correct'}}
buffer: {{groups_per_step: 32, group_size: 16, max_staleness: 2}}
advantages: {{kind: grpo}}
correction: {{kind: token_tis}}
loss: {{kind: decoupled_ppo}}
trainer: {{learning_rate: 5e-4}}
weights: {{interruption: keep}}
eval: {{kind: sets, sets: {{held_out: {{prompts: {{kind: function, function: '{TASK}:held_out_sums'}}}}}}}}
run: {{name: test, steps: 3}}
"""
TREE = yaml_text.read(TEXT)


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def parsed(**changes) -> RunConfig:
    """The recipe with `section__key=value` set."""
    tree = copy.deepcopy(TREE)
    for path, value in changes.items():
        node = tree
        *parents, leaf = path.split("__")
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return parse_config(tree, base=RECIPE.parent)


def refused(**changes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parsed(**changes)
    return caught.value


def test_the_quickstart_loads_and_its_functions_are_files_beside_it():
    config = load_config(RECIPE)
    assert config.env.reward == f"{TASK}:is_correct"
    assert config.eval.sets["held_out"].prompts.function == f"{TASK}:held_out_sums"
    assert config.buffer.max_staleness == 2
    assert (config.loss.kind, config.correction.kind, config.weights.interruption) == ("decoupled_ppo", "token_tis", "keep")


def test_what_is_dumped_parses_to_an_equal_configuration(recipe, tmp_path):
    config = load_config(recipe, ["trainer.learning_rate=1e-5", "sampling.stop=[]", "run.name='1e4'",
                                  "trainer.schedule={kind: cosine, total_steps: 9}", "prompts.arguments.note=äöü → 1"])
    copied = tmp_path / "config.yaml"
    copied.write_text(dump_config(config), encoding="utf-8")
    assert load_config(copied) == config
    assert config.run.name == "1e4"


@pytest.mark.parametrize("module", ["asyncrl", "asyncrl.config", "asyncrl.buffer", "asyncrl.rollout.router", "asyncrl.rollout.worker",
                                    "asyncrl.train.trainer", "asyncrl.train.prepare", "asyncrl.training", "asyncrl.cli"])
def test_the_controller_imports_no_torch(module):
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'wandb', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("changes", "field", "near"), [
    ({"trainer__learnig_rate": 1e-6}, "trainer.learnig_rate", "learning_rate"),
    ({"trane": {}}, "trane", "trainer"),
    ({"engine__kv_cache": 1}, "engine.kv_cache", "kv_cache_tokens"),
    ({"loss__clip_hgh": 1}, "loss.clip_hgh", "clip_high"),
    ({"correction__truncate_hi": 1}, "correction.truncate_hi", "truncate_high"),
    ({"eval__every_step": 1}, "eval.every_step", "every_steps"),
    ({"eval__sets__held_out__limi": 1}, "eval.sets.held_out.limi", "limit"),
    ({"eval__sets__held_out__prompts__functio": "a"}, "eval.sets.held_out.prompts.functio", "function"),
    ({"run__probe__every_step": 1}, "run.probe.every_step", "every_steps"),
    ({"run__wandb": {"kind": "wandb", "projct": "a"}}, "run.wandb.projct", "project"),
    ({"trainer__schedule": {"kind": "linear", "total_step": 3}}, "trainer.schedule.total_step", "total_steps")])
def test_an_unknown_key_names_its_place_and_its_nearest_neighbour(changes, field, near):
    error = refused(**changes)
    assert error.field == field
    assert error.remedy == f"Did you mean {near!r}?"


def test_a_misspelt_required_key_is_named_before_the_one_that_is_missing():
    error = refused(trainer={"learning_rat": 1e-3})
    assert (error.field, error.remedy) == ("trainer.learning_rat", "Did you mean 'learning_rate'?")


@pytest.mark.parametrize(("changes", "remedy"), [
    ({"trainer__lr": 1e-4}, "Did you mean 'learning_rate'?"),
    ({"trainer__steps": 5}, "Did you mean 'run.steps'?"),
    ({"group_size": 8}, "Did you mean 'buffer.group_size'?"),
    ({"learning_rate": 1e-4}, "Did you mean 'warm_up.learning_rate' or 'trainer.learning_rate'?"),
    ({"loss__learning_rate": 1e-4}, "Did you mean 'warm_up.learning_rate' or 'trainer.learning_rate'?"),
    ({"model__path": "runs/mine"}, "It goes with model.kind=folder.")])
def test_a_key_in_the_wrong_place_or_shortened_is_shown_the_right_one(changes, remedy):
    assert refused(**changes).remedy == remedy


def test_an_unknown_key_without_neighbour_is_shown_what_there_is():
    error = refused(weights__zzz=1)
    assert error.remedy == "Remove it."
    assert "publish_every_steps" in error.allowed


@pytest.mark.parametrize(("changes", "field"), [
    ({"buffer__max_staleness": -1}, "buffer.max_staleness"), ({"buffer__group_size": 0}, "buffer.group_size"),
    ({"buffer__groups_per_step": 0}, "buffer.groups_per_step"), ({"env__timeout_s": 0}, "env.timeout_s"),
    ({"trainer__learning_rate": -1.0}, "trainer.learning_rate"), ({"trainer__processes": -1}, "trainer.processes"),
    ({"sampling__temperature": 0}, "sampling.temperature"), ({"sampling__max_new_tokens": 0}, "sampling.max_new_tokens"),
    ({"run__steps": 0}, "run.steps"), *(({"run__name": name}, "run.name") for name in ("", "a/../b", "/a", ".cache", "a\0b", "a\x1b[2J")),
    ({"run__folder": "a\0b"}, "run.folder"), ({"weights__publish_every_steps": 0}, "weights.publish_every_steps"),
    ({"warm_up__until_accuracy": 1.0}, "warm_up.until_accuracy"), ({"eval__every_steps": 0}, "eval.every_steps"),
    ({"trainer__learning_rate": float("inf")}, "trainer.learning_rate"), ({"sampling__temperature": float("nan")}, "sampling.temperature"),
    ({"loss__clip_low": 1.5}, "loss.clip_low"), ({"trainer__step_timeout_s": 0}, "trainer.step_timeout_s")])
def test_a_value_out_of_range_is_refused_at_load(changes, field):
    assert refused(**changes).field == field


@pytest.mark.parametrize(("changes", "field", "allowed"), [
    ({"engine": {"kind": "vlm"}}, "engine.kind", "one of ['inline', 'transformers', 'vllm']"),
    ({"engine": {"threads": 1}}, "engine.kind", "one of ['inline', 'transformers', 'vllm']"),
    ({"loss": "pppo"}, "loss.kind", f"one of {[kinds_of(section)[0] for section in members_of(LossConfig)]}"),
    ({"correction": "tis"}, "correction.kind",
     f"one of ['none', 'token_tis', 'icepop', 'preset', 'custom'], or a preset: {list(presets())}"),
    ({"trainer__schedule": {"kind": "lineer"}}, "trainer.schedule.kind", "one of ['constant', 'linear', 'cosine']"),
    ({"model": {"kind": "hub"}}, "model.kind", "one of ['folder', 'function']"),
    ({"buffer__policy": {"kind": "discard"}}, "buffer.policy.kind", "one of ['lease', 'soft', 'drop', 'token_mask', 'fixed_lag']")])
def test_an_unknown_kind_is_shown_the_kinds_there_are(changes, field, allowed):
    error = refused(**changes)
    assert (error.field, error.allowed) == (field, allowed)


@pytest.mark.parametrize("section", sorted(TREE))
@pytest.mark.parametrize("value", [3, [1], "text", None])
def test_a_section_that_is_no_mapping_is_refused_by_name(section, value):
    assert refused(**{section: value}).field.startswith(section)


def test_a_missing_section_is_named():
    tree = copy.deepcopy(TREE)
    del tree["trainer"]
    with pytest.raises(ConfigError, match=r"trainer = 'nothing' is not allowed: Field required"):
        parse_config(tree, base=RECIPE.parent)


def test_stale_data_without_a_chosen_correction_is_refused():
    error = refused(correction=None, buffer__max_staleness=1)
    assert error.field == "correction, buffer.max_staleness"
    assert "token_tis" in error.remedy
    assert refused(correction=None, buffer__max_staleness=0, buffer__policy={"kind": "soft"}).field == error.field


def test_fresh_data_needs_no_correction():
    assert parsed(correction=None, buffer__max_staleness=0).correction is None
    assert parsed(correction=None, buffer__max_staleness=0, buffer__policy={"kind": "fixed_lag", "lag_steps": 0},
                  weights__interruption="drain").correction is None


def test_the_choice_of_no_correction_is_a_choice():
    assert parsed(correction={"kind": "none"}).correction.kind == "none"


@pytest.mark.parametrize(("changes", "fields"), [
    ({"buffer__policy": {"kind": "fixed_lag", "lag_steps": 1}}, "weights.interruption, buffer.policy.kind"),
    ({"run__name": "../other"}, "run.name"), ({"run__name": "/tmp/other"}, "run.name"), ({"run__name": "."}, "run.name"),
    ({"trainer__minibatches_per_step": 33}, "trainer.minibatches_per_step, buffer.groups_per_step"),
    ({"buffer__window": 66}, "buffer.window, buffer.max_staleness, weights.publish_every_steps"),
    ({"weights__publish_every_steps": 4}, "buffer.window, buffer.max_staleness, weights.publish_every_steps"),
    ({"loss": "ppo"}, "loss.kind, correction.kind"),
    ({"loss__aggregation": "dr_grpo"}, "loss.aggregation, loss.max_tokens"),
    ({"trainer__processes": 0, "trainer__dtype": "bfloat16"}, "trainer.dtype, trainer.processes"),
    ({"buffer__min_valid_rollouts": 17}, "buffer.min_valid_rollouts, buffer.group_size"),
    ({"buffer__depth_groups": 1000}, "buffer.depth_groups, buffer.groups_per_step, buffer.max_staleness")])
def test_sections_that_are_wrong_together_are_refused_with_both_names(changes, fields):
    assert refused(**changes).field == fields


def test_the_widest_window_is_accepted():
    assert parsed(buffer__window=65).buffer.window == 65


@pytest.mark.parametrize(("name", "value"), [("min_new_tokens", 1), ("repetition_penalty", 1.1), ("presence_penalty", 0.5),
                                             ("frequency_penalty", 0.5)])
def test_sampling_that_no_engine_records_is_refused_with_the_reason(name, value):
    error = refused(**{f"sampling__{name}": value})
    assert error.field == f"sampling.{name}"
    assert "in a way the trainer does not know" in error.remedy


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_sampling_from_a_kept_set_is_for_engines_that_record_it(name, value):
    for kind in ("transformers", "inline"):
        assert getattr(parsed(**{f"sampling__{name}": value, "engine": {"kind": kind}}).sampling, name) == value
    error = refused(**{f"sampling__{name}": value, "engine": {"kind": "vllm"}})
    assert error.field == f"sampling.{name}, engine.kind"
    assert "every importance ratio would be off by the kept mass" in error.remedy


def test_experts_are_replayed_of_engines_that_record_them():
    for kind in ("transformers", "inline"):
        assert parsed(trainer__routing_replay=True, engine={"kind": kind}).training.wanted.routed_experts
    assert refused(trainer__routing_replay=True, engine={"kind": "vllm"}).field == "trainer.routing_replay, engine.kind"


@pytest.mark.parametrize(("override", "read", "value"), [
    ("trainer.learning_rate=1e-4", lambda c: c.trainer.learning_rate, 1e-4),
    ("trainer.betas=[0.8, 0.9]", lambda c: c.trainer.betas, (0.8, 0.9)),
    ("run.steps=7", lambda c: c.run.steps, 7),
    ("run.probe.every_steps=3", lambda c: c.run.probe.every_steps, 3),
    ("run.name=seven", lambda c: c.run.name, "seven"),
    ("run.name=a=b", lambda c: c.run.name, "a=b"),
    ("run.name='12'", lambda c: c.run.name, "12"),
    ("warm_up={kind: none}", lambda c: c.warm_up.kind, "none"),
    ("correction=none", lambda c: c.correction.kind, "none"),
    ("buffer.window=null", lambda c: c.buffer.window, None),
    ("prompts.arguments.noise=1e-1", lambda c: c.prompts.arguments["noise"], 0.1),
    ("prompts.arguments.noise='1e-1'", lambda c: c.prompts.arguments["noise"], "1e-1"),
    ("prompts.arguments.levels=[1e-1, 2]", lambda c: c.prompts.arguments["levels"], [0.1, 2])])
def test_an_override_sets_one_value(recipe, override, read, value):
    assert read(load_config(recipe, [override])) == value


def test_a_key_is_given_once(recipe):
    with pytest.raises(ConfigError, match=r"run\.steps.*each key once"):
        load_config(recipe, ["run.steps=7", "run.seed=1", "run.steps=9"])


@pytest.mark.parametrize("override", ["run.steps", "=3", "", "run.steps=[1", "run.steps={a: b: c}", "run.name.first=a", "run.steps=many",
                                      "trainer.betas.0=0.5", ".run=3", "run..steps=3", "nothing=3", "run.steps=1\x00",
                                      "run.steps=&x [*x]", "run.steps=" + "9" * 5000, "run.steps=0x" + "f" * 6000, "a." * 2000 + "b=1"])
def test_a_bad_override_is_a_config_error(recipe, override):
    with pytest.raises(ConfigError):
        load_config(recipe, [override])


def test_a_path_through_a_value_says_so(recipe):
    with pytest.raises(ConfigError, match="name is a value, not a section"):
        load_config(recipe, ["run.name.first=a"])


def test_an_unknown_override_names_its_neighbour(recipe):
    with pytest.raises(ConfigError, match=r"trainer\.learnig_rate.*Did you mean 'learning_rate'"):
        load_config(recipe, ["trainer.learnig_rate=1e-6"])


@pytest.mark.parametrize(("reward", "text"), [("none.py:f", "Looked for"), ("lambda p, c: 1.0", "module-level function"),
                                              ("is_correct", "file.py:function"), ("a\0b.py:f", "Looked for"),
                                              ("a" * 5000 + ".py:f", "Looked for")])
def test_a_bad_reference_is_refused_by_its_field(reward, text):
    error = refused(env__reward=reward)
    assert error.field == "env.reward"
    assert text in str(error)


def test_what_a_user_calls_his_arguments_is_his_own():
    arguments = {"function": "sin", "reward": "high", "examples": {"held_out": "x"}}
    assert parsed(prompts__arguments=arguments).prompts.arguments == arguments


@pytest.mark.parametrize(("content", "text"), [
    (b"- a\n- b\n", "a mapping of sections"), (b"", "a mapping of sections"), (b"a: [1\n", "valid YAML"), (b"\xff\xfe\x00a", "valid YAML"),
    (b"run: {name: a}\nrun: {name: b}\n", "written twice: run"), (b"trainer: {threads: 1, threads: 2}\n", "written twice: threads")])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, text):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        load_config(path)


def test_a_missing_recipe_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="an existing YAML file"):
        load_config(tmp_path / "none.yaml")


def test_numbers_with_an_exponent_are_numbers_in_the_file_too(recipe):
    config = load_config(recipe)
    assert config.warm_up.arguments == {"noise": 0.3}
    assert config.trainer.learning_rate == 5e-4


def test_a_configuration_is_frozen():
    config = parsed()
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_a_resolved_configuration_means_the_same_from_every_folder(recipe, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here" / "models" / "small").mkdir(parents=True)
    (tmp_path / "here" / "rewards.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(recipe, ["model={kind: folder, path: models/small}", "warm_up=none", "env.reward=rewards.py:score"])
    assert (config.model.path, config.env.reward) == (str(tmp_path / "here/models/small"), f"{tmp_path / 'here/rewards.py'}:score")
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(("changes", "field", "allowed"), [
    ({"buffer__depth_groups": "many"}, "buffer.depth_groups", "Input should be 'auto' or 'max' or a valid integer"),
    ({"buffer__depth_groups": True}, "buffer.depth_groups", "Input should be 'auto' or 'max' or a valid integer"),
    ({"env__reward": 3}, "env.reward", "Input should be a valid string or a valid dictionary"),
    ({"env__reward": {"form": 3}}, "env.reward.form", "Input should be a valid string"),
    ({"trainer__betas": [0.9]}, "trainer.betas.1", "Field required"),
    ({"trainer__betas": [0.9, "1"]}, "trainer.betas.1", "Input should be a valid number"),
    ({"sampling__stop": ["a", ""]}, "sampling.stop.1", "String should have at least 1 character"),
    ({"run__steps": "100"}, "run.steps", "Input should be a valid integer"),
    ({"run__steps": 100.0}, "run.steps", "Input should be a valid integer"),
    ({"eval__sets__held_out__limit": "3"}, "eval.sets.held_out.limit", "Input should be a valid integer")])
def test_a_value_of_another_type_is_refused_by_its_place(changes, field, allowed):
    error = refused(**changes)
    assert error.field == field
    assert error.allowed.startswith(allowed)


def test_a_pair_in_a_section_that_stands_in_several_places_is_named_where_it_stands():
    pass_rate = {"kind": "pass_rate", "solved_above": 0.3, "hopeless_below": 0.5}
    assert refused(prompts__curriculum=pass_rate).field == "prompts.curriculum.hopeless_below, prompts.curriculum.solved_above"

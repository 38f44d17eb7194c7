"""No option is accepted without effect: each field of each section is changed alone, and something observable must differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest

from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import ConfigError
from asyncrl.settings import kinds_of, members_of
from tests import algorithm_flips, lora_flips, optimizer_flips
from tests import config_observers as see
from tests import data_observers as see_data
from tests import eval_observers as see_eval
from tests import healing_observers as see_healing
from tests import parallel_observers as see_parallel
from tests import transport_observers as see_transport
from tests import turns_observers as see_turns
from tests.config_flips import Flip, flip
from tests.config_observers import Observer, Scene
from tests.rollout.model_rig import PublishedModel, publish_model

HERE = Path(__file__).parent
TASK, WARM_TASK = HERE / "effects_task.py", HERE / "train" / "prepare_task.py"
FUNCTION_DATA = {"kind": "function", "function": f"{TASK}:questions"}
JSONL_DATA = {"kind": "jsonl", "path": "none.jsonl"}
OWN = "one"
"""A name of the user's own, in a mapping of sections."""
WARM_UP = {"kind": "cross_entropy", "examples": f"{TASK}:seeded_copies", "held_out": f"{WARM_TASK}:held_out_copies", "until_accuracy": 0.14,
           "batch_size": 16, "learning_rate": 3e-2, "ramp_steps": 3, "check_every_steps": 1, "max_steps": 40, "threads": 1}
MADE_MODEL = {"kind": "function", "function": f"{WARM_TASK}:tiny_model", "arguments": {"hidden": 16}}
TREE: dict[str, Any] = {
    "model": {"kind": "folder", "path": "model"},
    "prompts": FUNCTION_DATA,
    "engine": {"kind": "transformers"},
    "sampling": {"max_new_tokens": 4},
    "env": {"kind": "single_turn", "reward": f"{TASK}:always_one"},
    "buffer": {"groups_per_step": 2, "group_size": 3, "max_staleness": 1, "stall_timeout_s": 60.0, "max_empty_fills": 3},
    "advantages": "grpo",
    "correction": "token_tis",
    "loss": "decoupled_ppo",
    "trainer": {"learning_rate": 3e-2, "epochs": 2},
    "run": {"name": "effects", "steps": 5},
}
SECTIONS: dict[str, Any] = {
    "model.folder": TREE["model"], "model.function": MADE_MODEL, "warm_up.cross_entropy": WARM_UP, "warm_up.none": {"kind": "none"},
    "prompts.function": FUNCTION_DATA, "prompts.jsonl": JSONL_DATA,
    "prompts.mixture": {"kind": "mixture", "sources": {OWN: FUNCTION_DATA, "two": dict(FUNCTION_DATA)}},
    "prompts.mixture.sources.function": {OWN: FUNCTION_DATA, "two": dict(FUNCTION_DATA)},
    "prompts.mixture.sources.jsonl": {OWN: JSONL_DATA, "two": FUNCTION_DATA},
    "engine.inline": {"kind": "inline"}, "engine.transformers": TREE["engine"], "engine.vllm": {"kind": "vllm"},
    "buffer.policy.lease": {"kind": "lease"}, "buffer.policy.fixed_lag": {"kind": "fixed_lag", "lag_steps": 0},
    **{f"buffer.policy.{kind}": {"kind": kind, "cut_staleness": 1} for kind in ("drop", "token_mask")},
    **algorithm_flips.SECTIONS, **lora_flips.SECTIONS, **optimizer_flips.SECTIONS,
    "trainer.schedule.constant": {"kind": "constant"},
    "trainer.schedule.linear": {"kind": "linear", "total_steps": 3}, "trainer.schedule.cosine": {"kind": "cosine", "total_steps": 3},
    "colocation.turns": {"kind": "turns"}, "weights.transport.store": {"kind": "store"}, "weights.transport.nccl": {"kind": "nccl"},
    "eval.sets": {"kind": "sets", "sets": {OWN: {"prompts": FUNCTION_DATA}}, "every_steps": 2},
    "eval.sets.sets.prompts.function": FUNCTION_DATA, "eval.sets.sets.prompts.jsonl": JSONL_DATA,
    "eval.sets.best.keep": {"kind": "keep"},
    "run.wandb.wandb": {"kind": "wandb"}}
DATA_PLACES = tuple(f"prompts.{place}{kind}" for place in ("", "mixture.sources.") for kind in ("function", "jsonl"))
SECTIONS |= {f"{place}.{kind}": section for place in DATA_PLACES for kind, section in {
    "shuffle.buffer": {"kind": "buffer", "rows": 3}, "shuffle.full": {"kind": "full"}, "shuffle.none": {"kind": "none"},
    "curriculum.none": {"kind": "none"}, "curriculum.pass_rate": {"kind": "pass_rate", "min_rollouts": 2}}.items()}
SHAPED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
"""Advantages of rewards that may be less for long rollouts."""
SECTIONS |= {f"advantages.{kind}": {"kind": kind} for kind in SHAPED} | {
    f"advantages.{kind}.overlong.soft": {"kind": "soft", "max_tokens": 8, "cache_tokens": 4} for kind in SHAPED}
"""The section each kind is tried in."""


WARM = {"model": MADE_MODEL}
DRAIN = {"weights__interruption": "drain"}
VLLM = {"engine": {"kind": "vllm"}}
TWO_SETS = {"kind": "sets", "sets": {name: {"prompts": FUNCTION_DATA, "pass_at": [1]} for name in (OWN, "two")}}
FLIPS: dict[str, Flip] = {
    "model.kind": flip(MADE_MODEL, see.processes), "model.folder.path": flip("another", see.prepared),
    "model.function.function": flip(f"{WARM_TASK}:half_a_model", see.prepared),
    "model.function.arguments": flip({"hidden": 8}, see.prepared),
    "warm_up.kind": flip(WARM_UP, see.processes),
    "warm_up.cross_entropy.examples": flip(f"{WARM_TASK}:ten_copies", see.prepared, **WARM),
    "warm_up.cross_entropy.held_out": flip(f"{WARM_TASK}:no_copies", see.prepared, **WARM),
    "warm_up.cross_entropy.arguments": flip({"unheard_of": 1}, see.prepared, **WARM),
    "warm_up.cross_entropy.until_accuracy": flip(0.3, see.prepared, **WARM),
    "warm_up.cross_entropy.batch_size": flip(7, see.prepared, **WARM),
    "warm_up.cross_entropy.learning_rate": flip(1e-2, see.prepared, **WARM),
    "warm_up.cross_entropy.betas": flip([0.5, 0.6], see.prepared, **WARM),
    "warm_up.cross_entropy.ramp_steps": flip(9, see.prepared, **WARM),
    "warm_up.cross_entropy.check_every_steps": flip(40, see.prepared, **WARM),
    "warm_up.cross_entropy.max_steps": flip(1, see.prepared, **WARM),
    "warm_up.cross_entropy.threads": flip(2, see.prepared, **WARM),
    "warm_up.cross_entropy.seed": flip(1, see.prepared, **WARM),
    "prompts.kind": flip(JSONL_DATA | {"path": "other.jsonl"}, see.parts),
    "prompts.function.function": flip(f"{TASK}:other_questions", see.parts), "prompts.function.arguments": flip({"count": 2}, see.parts),
    "prompts.jsonl.path": flip("other.jsonl", see.parts),
    **{f"{place}.{name}": flip(value, see_data.asked) for place in DATA_PLACES for name, value in {
        "epochs": 1, "shuffle.kind": {"kind": "full"}, "shuffle.buffer.rows": 2, "max_prompt_tokens": 3,
        "curriculum.kind": {"kind": "pass_rate", "min_rollouts": 2}, "curriculum.pass_rate.success_reward": 0.5,
        "curriculum.pass_rate.solved_above": 0.5, "curriculum.pass_rate.hopeless_below": 0.5, "curriculum.pass_rate.min_rollouts": 3,
        "curriculum.pass_rate.recheck_after_prompts": 2}.items()},
    "prompts.mixture.sources.kind": flip({OWN: JSONL_DATA | {"path": "other.jsonl"}, "two": FUNCTION_DATA}, see_data.asked),
    "prompts.mixture.sources.function.function": flip(f"{TASK}:other_questions", see_data.asked),
    "prompts.mixture.sources.function.arguments": flip({"count": 2}, see_data.asked),
    "prompts.mixture.sources.jsonl.path": flip("other.jsonl", see_data.asked),
    **{f"prompts.mixture.sources.{kind}.weight": flip(3.0, see_data.asked) for kind in ("function", "jsonl")},
    **{f"prompts.mixture.sources.{kind}.{name}": flip(value, see.parts) for kind in ("function", "jsonl") for name, value in {
        "env.reward": f"{TASK}:always_two", "env.workers": 2, "env.timeout_s": 3.0, "env.memory_bytes": 10**8,
        "sampling.temperature": 0.7, "sampling.max_new_tokens": 5}.items()},
    **{f"prompts.mixture.sources.{kind}.sampling.stop": flip(["="], see.parts, **VLLM) for kind in ("function", "jsonl")},
    "engine.kind": flip({"kind": "inline"}, see.processes), "engine.inline.dtype": flip("bfloat16", see.inline_engine),
    "engine.inline.threads": flip(2, see.inline_engine),
    "engine.inline.max_batch_requests": flip(2, see.inline_engine), "engine.inline.context_tokens": flip(32, see.inline_engine),
    "engine.inline.logit_noise": flip(0.1, see.inline_engine),
    **{f"engine.transformers.{name}": flip(value, see.engine_spec) for name, value in {
        "dtype": "bfloat16", "threads": 2, "max_batch_tokens": 64, "max_running_requests": 4, "kv_cache_tokens": 4096,
        "context_tokens": 32, "seed": 5}.items()},
    **{f"engine.vllm.{name}": flip(value, see.engine_spec) for name, value in {
        "dtype": "bfloat16", "threads": 2, "tensor_parallel_size": 2, "max_batch_tokens": 512, "max_running_requests": 4,
        "kv_cache_bytes": 2**22, "context_tokens": 32, "seed": 5}.items()},
    "sampling.temperature": flip(0.7, see.parts), "sampling.max_new_tokens": flip(5, see.parts),
    **{f"sampling.{name}": flip(value, see.parts) for name, value in {
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_new_tokens": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1}.items()},
    "sampling.stop": flip(["="], see.parts, **VLLM),
    "env.reward": flip(f"{TASK}:always_two", see.parts), "env.workers": flip(2, see.parts), "env.timeout_s": flip(3.0, see.parts),
    "env.memory_bytes": flip(10**8, see.parts),
    "buffer.groups_per_step": flip(3, see.buffer_story), "buffer.group_size": flip(4, see.buffer_story),
    "buffer.max_staleness": flip(2, see.buffer_story), "buffer.policy.kind": flip({"kind": "soft"}, see.buffer_story),
    "buffer.policy.fixed_lag.lag_steps": flip(1, see.buffer_story, **DRAIN),
    **{f"buffer.policy.{kind}.cut_staleness": flip(0, see.buffer_story) for kind in ("drop", "token_mask")},
    "buffer.window": flip(2, see.buffer_story),
    "buffer.depth_groups": flip(2, see.buffer_story),
    "buffer.zero_variance": flip("keep", see.buffer_story, buffer__max_empty_fills=8),
    "buffer.zero_variance_tolerance": flip(1e-2, see.buffer_story), "buffer.min_valid_rollouts": flip(3, see.buffer_story),
    "buffer.max_bytes": flip(1, see.buffer_story), "buffer.stall_timeout_s": flip(30.0, see.buffer_story, buffer__groups_per_step=3),
    "buffer.max_empty_fills": flip(1, see.buffer_story),
    "advantages.kind": flip("rloo", see.trained), "advantages.grpo.unbiased_std": flip(False, see.trained),
    "advantages.reinforce_plus_plus.gamma": flip(0.5, see.trained),
    **{f"advantages.gae.{name}": flip(value, see.trained) for name, value in {
        "gamma": 0.5, "lam": 0.5, "whiten": False, "critic.learning_rate": 1e-2, "critic.max_grad_norm": 1e-3, "critic.epochs": 2,
        "critic.warm_up_steps": 2}.items()},
    "advantages.gae.critic.value_clip": flip(0.001, see.trained, advantages={
        "kind": "gae", "critic": {"learning_rate": 1e-2, "epochs": 2}}),
    **{f"advantages.{kind}.overlong.{name}": flip(value, see.trained, sampling__max_new_tokens=9) for kind in SHAPED for name, value in {
        "kind": {"kind": "soft", "max_tokens": 8, "cache_tokens": 4}, "soft.max_tokens": 9, "soft.cache_tokens": 3,
        "soft.weight": 0.5}.items()},
    **algorithm_flips.FLIPS, **lora_flips.FLIPS, **optimizer_flips.FLIPS,
    "trainer.routing_replay": flip(True, see.routed),
    "trainer.processes": flip(2, see.supervised_ranks), "trainer.threads": flip(2, see.trained),
    "trainer.learning_rate": flip(1e-3, see.trained), "trainer.schedule.kind": flip({"kind": "cosine", "total_steps": 3}, see.trained),
    "trainer.schedule.constant.warm_up_steps": flip(2, see.trained),
    **{f"trainer.schedule.{kind}.{name}": flip(value, see.trained) for kind in ("linear", "cosine")
       for name, value in {"warm_up_steps": 2, "total_steps": 5, "final_frac": 0.5}.items()},
    **{f"trainer.{name}": flip(value, see.trained) for name, value in {
        "betas": [0.5, 0.6], "eps": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e-3, "microbatch_tokens": 16, "logits_chunk": 16,
        "minibatches_per_step": 2, "epochs": 3, "dtype": "bfloat16"}.items()},
    **{f"trainer.{name}": flip(value, see_parallel.sharded) for name, value in {
        "attention": "sdpa", "activation_checkpointing": "full", "compile": True, "tensor_parallel": 2, "context_parallel": 2,
        "sharding.prefetch_layers": 0, "sharding.reshard_after_forward": False, "sharding.reduce_dtype": "bfloat16"}.items()},
    **{f"trainer.{name}": flip(value, see.supervised_ranks) for name, value in {
        "max_nonfinite_steps": 2, "checkpoint_every_steps": 2, "record_batches_every_steps": 2,
        "max_restarts": 1, "step_timeout_s": 9.0, "start_timeout_s": 9.0}.items()},
    "weights.publish_every_steps": flip(2, see.parts), "weights.interruption": flip("recompute", see.updates),
    "weights.drain_timeout_s": flip(5.0, see_healing.patience, **DRAIN), "weights.apply_timeout_s": flip(5.0, see_healing.patience),
    "weights.fetch_timeout_s": flip(5.0, see_healing.patience), "weights.engine_restarts": flip(1, see_healing.restarts),
    "weights.dtype": flip("float32", see.published), "weights.anchor_every_versions": flip(1, see.published),
    "weights.transport.kind": flip({"kind": "nccl"}, see_transport.stored),
    "weights.transport.store.root": flip("memory://elsewhere", see_transport.stored),
    "weights.transport.store.compression": flip("zstd", see_transport.stored),
    "weights.transport.store.keep_bytes": flip(None, see_transport.stored),
    "weights.transport.nccl.timeout_s": flip(2.0, see_transport.pushed),
    "colocation.kind": flip({"kind": "turns"}, see_turns.turns, buffer__max_staleness=0),
    "colocation.turns.trainer": flip("keep", see_turns.turns, buffer__max_staleness=0),
    "eval.kind": flip({"kind": "sets", "sets": {OWN: {"prompts": FUNCTION_DATA}}}, see.course),
    "eval.sets.sets.prompts.kind": flip(JSONL_DATA | {"path": "other.jsonl"}, see_eval.evaluated),
    "eval.sets.sets.prompts.function.function": flip(f"{TASK}:other_questions", see_eval.evaluated),
    "eval.sets.sets.prompts.function.arguments": flip({"count": 2}, see_eval.evaluated),
    "eval.sets.sets.prompts.jsonl.path": flip("other.jsonl", see_eval.evaluated), "eval.sets.sets.limit": flip(3, see_eval.evaluated),
    "eval.sets.sets.samples_per_prompt": flip(2, see_eval.evaluated), "eval.sets.sets.pass_at": flip([1], see_eval.evaluated),
    "eval.sets.sets.success_reward": flip(0.5, see_eval.evaluated, eval=TWO_SETS),
    **{f"eval.sets.sets.sampling.{name}": flip(value, see_eval.evaluated, **VLLM) for name, value in {
        "temperature": 0.5, "max_new_tokens": 2, "stop": ["="], "top_p": 0.9, "top_k": 5, "min_p": 0.1}.items()},
    **{f"eval.sets.sets.env.{name}": flip(value, see.parts) for name, value in {
        "reward": f"{TASK}:always_two", "workers": 2, "timeout_s": 3.0, "memory_bytes": 10**8}.items()},
    "eval.sets.every_steps": flip(3, see.course), "eval.sets.best.kind": flip({"kind": "none"}, see_eval.kept),
    "eval.sets.best.keep.set": flip("two", see_eval.kept, eval=TWO_SETS),
    "eval.sets.best.keep.metric": flip("pass_at_1", see_eval.kept, eval=TWO_SETS),
    "run.name": flip("other", see.folder), "run.folder": flip("elsewhere", see.folder), "run.steps": flip(6, see.course),
    "run.seed": flip(3, see.engine_spec), "run.rollouts_every_steps": flip(2, see.folder),
    "run.deterministic": flip(True, see.parts, engine={"kind": "inline"}, buffer__max_staleness=0),
    "run.probe.every_steps": flip(2, see.parts), "run.probe.prompts": flip(2, see.parts), "run.probe.max_mean_gap": flip(0.5, see.parts),
    "run.error_budget": flip(0.25, see.parts),
    "run.wandb.kind": flip({"kind": "wandb"}, see.folder), "run.wandb.wandb.project": flip("other", see.folder)}

ENDS_IN_AN_ERROR = {
    "correction.preset.loss", "trainer.tensor_parallel", "trainer.context_parallel",
    *(f"sampling.{name}" for name in ("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")),
    "model.function.function", *(f"warm_up.cross_entropy.{name}" for name in ("examples", "held_out", "arguments"))}
"""Their other value is refused by training, or fails in the user's function that gets it. All others change what a run does."""

Kinds = tuple[tuple[str, str], ...]
"""Kinds a field lies under, and where a user writes the section of each."""


def fields_of(model: Any, *, path: str = "", place: str = "", kinds: Kinds = ()) -> Iterator[tuple[str, str, Kinds]]:
    """Each field: its name with the kinds it lies under, the place where a user writes it, and those kinds."""
    for name, info in model.model_fields.items():
        members = members_of(info.annotation)
        if name == "kind":
            continue
        if not members:
            yield f"{path}{name}", f"{place}{name}", kinds
        if len(members) > 1:
            yield f"{path}{name}.kind", f"{place}{name}", kinds
        for member in members:
            kind = f"{path}{name}.{kinds_of(member)[0]}" if len(members) > 1 else f"{path}{name}"
            under = (*kinds, (kind, f"{place}{name}")) if len(members) > 1 else kinds
            item = {dict: f"{OWN}.", tuple: "0."}.get(get_origin(info.annotation), "")
            inside = f"{place}{name}.{item}"
            yield from fields_of(member, path=f"{kind}.", place=inside, kinds=under)


FIELDS = {name: (place, kinds) for name, place, kinds in fields_of(RunConfig)}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> PublishedModel:
    for name, sign in (("none", "+"), ("other", "-")):
        rows = [f'{{"prompt": "{number}{sign}1="}}\n' for number in range(4)]
        (tmp_path_factory.getbasetemp() / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    return publish_model(tmp_path_factory.mktemp("published"))


def put(tree: Any, place: str, value: Any) -> None:
    *parents, leaf = (int(name) if name.isdigit() else name for name in place.split("."))
    for name in parents:
        if isinstance(tree, list):
            tree = tree[name]
            continue
        if isinstance(tree.get(name), str):
            tree[name] = {"kind": tree[name]}
        tree = tree.setdefault(name, {})
    tree[leaf] = copy.deepcopy(value)


def seen(observe: Observer, tree: dict[str, Any], scene: Scene) -> object:
    """What is observed; a refusal, or what the user's own function raises, is something to see too."""
    try:
        return observe(parse_config(tree, base=HERE), scene)
    except (ConfigError, OSError, TypeError) as error:
        return repr(error)


def test_every_field_is_tried() -> None:
    assert set(FLIPS) == set(FIELDS)


@pytest.mark.parametrize(("steps", "last"), [(4, 4), (3, 3), (1, 1)])
def test_the_last_evaluation_is_at_the_end_though_the_data_end_early(steps: int, last: int, published: PublishedModel, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(TREE | {"eval": SECTIONS["eval.sets"]}, base=HERE)
    happened = see.course(config, Scene(published, tmp_path, monkeypatch), most_steps=steps)
    evaluated = [event[1] for event in happened if event[0] == "eval"]
    assert evaluated[-1] == last
    assert len(evaluated) == len(set(evaluated))


def test_an_evaluation_without_prompts_is_refused(published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"kind": "sets", "sets": {OWN: {"prompts": FUNCTION_DATA | {"arguments": {"count": 0}}}}}
    with pytest.raises(ConfigError, match=rf"eval\.sets\.{OWN}\.prompts"):
        see.parts(parse_config(TREE | {"eval": none}, base=HERE), Scene(published, tmp_path, monkeypatch))


def base_of(field: str) -> dict[str, Any]:
    """The configuration that a field is changed in."""
    tree = copy.deepcopy(TREE)
    for other, value in FLIPS[field].around:
        put(tree, other, value)
    for kind, section in FIELDS[field][1]:
        if section not in dict(FLIPS[field].around):
            put(tree, section, SECTIONS[kind])
    return tree


ONE_OF_EACH_OBSERVER = {flip.observe: field for field, flip in sorted(FLIPS.items())}.values()


@pytest.mark.parametrize("field", ONE_OF_EACH_OBSERVER, ids=lambda field: FLIPS[field].observe.__name__)
def test_nothing_changed_changes_nothing(field: str, published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    results = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            results.append(seen(FLIPS[field].observe, base_of(field), Scene(published, tmp_path / "one", patch)))
    assert results[0] == results[1]


@pytest.mark.parametrize("field", sorted(FLIPS))
def test_a_changed_field_changes_something(field: str, published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    before, after = base_of(field), base_of(field)
    put(after, FIELDS[field][0], FLIPS[field].value)
    results = []
    for name, tree in (("before", before), ("after", after)):
        with monkeypatch.context() as patch:
            results.append(seen(FLIPS[field].observe, tree, Scene(published, tmp_path / name, patch)))
    assert not isinstance(results[0], str), f"the configuration this starts from does not work: {results[0]}"
    assert results[0] != results[1]
    assert isinstance(results[1], str) == (field in ENDS_IN_AN_ERROR)

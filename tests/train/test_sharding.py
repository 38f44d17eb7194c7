"""What ranks do together is what one rank does alone, however the model is cut, kept, gathered and computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.train.model import load_policy
from tests.timeless import timeless
from tests.tiny_model import make_tiny_model
from tests.train.families import make_family
from tests.train.forked_ranks import Job, Outcome, run_jobs
from tests.train.test_layers import has_compiler

pytestmark = pytest.mark.slow

LEARNING_RATE, STEPS = 1e-2, 10
MOST_DEVIATION = 0.02
"""Of a weight after ten AdamW steps, in learning rates; 2e-4 was measured."""
MODES = {
    "selective": {"activation_checkpointing": "selective"}, "full": {"activation_checkpointing": "full"},
    "gathered late": {"sharding": {"prefetch_layers": 0}}, "gathered early": {"sharding": {"prefetch_layers": 16}},
    "kept whole": {"sharding": {"reshard_after_forward": False}},
    "all": {"activation_checkpointing": "full", "sharding": {"prefetch_layers": 2, "reshard_after_forward": False}}}
MODES_ON = [*((mode, 2) for mode in MODES), ("selective", 1), ("all", 1)]
FROZEN = [r".*layers\.0\..*"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`split` has the weights of `tied` in a head of its own."""
    root = tmp_path_factory.mktemp("models")
    tied = make_tiny_model(root / "tied", layers=3)
    split = make_tiny_model(root / "split", layers=3, tie=False)
    lm = AutoModelForCausalLM.from_pretrained(split)
    lm.load_state_dict(AutoModelForCausalLM.from_pretrained(tied).state_dict())
    lm.save_pretrained(split)
    families = {name: make_family(name, root / name[:5]) for name in ("qwen3-moe",)}
    return {name: str(path) for name, path in {"tied": tied, "split": split, **families}.items()}


@pytest.fixture(scope="module")
def outcomes(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [Job(f"{name} on {ranks}", models[name], ranks, STEPS, {"microbatch_tokens": tokens})
            for name, splits in {"tied": ((0, 4096), (1, 60), (2, 40), (4, 24)), "qwen3-moe": ((0, 4096), (2, 40))}.items()
            for ranks, tokens in splits]
    jobs += [Job(f"{mode} on {ranks}", models["tied"], ranks, settings=MODES[mode]) for mode, ranks in MODES_ON]
    jobs += [Job(f"plain on {ranks}", models["tied"], ranks) for ranks in (0, 1, 2)]
    jobs += [Job(f"frozen on {ranks}", models["tied"], ranks, 2, {"frozen": FROZEN}) for ranks in (0, 2)]
    jobs += [Job("split", models["split"], 2), Job("bfloat16", models["tied"], 2, settings={"dtype": "bfloat16"}),
             Job("reduced in bfloat16", models["tied"], 2, settings={"sharding": {"reduce_dtype": "bfloat16"}}),
             Job("restored", models["tied"], 1, 0, restore=str(folder / "plain on 2" / "checkpoint"))]
    jobs += [Job("compiled", models["tied"], 1, settings={"compile": True})] if has_compiler() else []
    return run_jobs(jobs, folder)


def largest(tensors: dict[str, Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return largest({name: tensor - theirs[name] for name, tensor in ours.items()})


@pytest.mark.parametrize(("model", "ranks"), [("tied", 1), ("tied", 2), ("tied", 4), ("qwen3-moe", 2)])
def test_ten_steps_are_the_same_on_any_number_of_ranks_and_micro_batches(model: str, ranks: int, models: dict[str, str],
                                                                           outcomes: dict[str, Outcome]) -> None:
    alone, together = outcomes[f"{model} on 0"], outcomes[f"{model} on {ranks}"]
    assert gap(together.weights, alone.weights) <= MOST_DEVIATION * LEARNING_RATE
    start = {name: parameter.detach() for name, parameter in load_policy(Path(models[model])).lm.named_parameters()}
    assert gap(alone.weights, start) > 3 * LEARNING_RATE
    for ours, theirs in zip(together.metrics, alone.metrics, strict=True):
        for name in ("train/loss/mean", "train/grad_norm/last", "train/entropy/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)


def test_each_rank_holds_its_share_in_float32(outcomes: dict[str, Outcome]) -> None:
    total = sum(tensor.numel() for tensor in outcomes["tied on 0"].weights.values())
    for ranks in (1, 2, 4):
        facts = outcomes[f"tied on {ranks}"].facts.values()
        assert sum(fact["held"] for fact in facts) == total
        assert max(fact["held"] for fact in facts) <= 1.1 * total / ranks
    assert all(fact["dtypes"] == ["torch.float32"] for outcome in outcomes.values() for fact in outcome.facts.values())


@pytest.mark.parametrize(("mode", "ranks"), MODES_ON)
def test_no_mode_moves_a_bit(mode: str, ranks: int, outcomes: dict[str, Outcome]) -> None:
    changed, plain = outcomes[f"{mode} on {ranks}"], outcomes[f"plain on {ranks}"]
    assert gap(changed.gradients, plain.gradients) == 0
    assert gap(changed.weights, plain.weights) == 0
    assert [timeless(step) for step in changed.metrics] == [timeless(step) for step in plain.metrics]
    assert gap(changed.gradients, outcomes["plain on 0"].gradients) <= 1e-6 * largest(plain.gradients)


def test_compiled_layers_train_alike(outcomes: dict[str, Outcome]) -> None:
    if not has_compiler():
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    plain = outcomes["plain on 1"].gradients
    assert gap(outcomes["compiled"].gradients, plain) <= 1e-5 * largest(plain)


def test_frozen_parameters_are_cut_like_others_and_stay(models: dict[str, str], outcomes: dict[str, Outcome]) -> None:
    alone, together = outcomes["frozen on 0"], outcomes["frozen on 2"]
    start = {name: parameter.detach() for name, parameter in load_policy(Path(models["tied"])).lm.named_parameters()}
    stayed = {name for name in start if torch.equal(start[name], together.weights[name])}
    assert stayed == {name for name in start if ".layers.0." in name}
    assert gap(together.weights, alone.weights) <= MOST_DEVIATION * LEARNING_RATE
    assert together.facts[0]["held"] < 0.6 * sum(tensor.numel() for tensor in start.values())


def test_half_precision_rounds_the_gradient_and_nothing_else(outcomes: dict[str, Outcome]) -> None:
    plain = outcomes["plain on 2"].gradients
    for name, most in (("bfloat16", 0.1), ("reduced in bfloat16", 2**-7)):
        assert 0 < gap(outcomes[name].gradients, plain) < most * largest(plain)


def test_tied_weights_stay_one_through_shards_checkpoint_and_export(models: dict[str, str], outcomes: dict[str, Outcome]) -> None:
    two, restored, split = outcomes["plain on 2"], outcomes["restored"], outcomes["split"]
    assert all(fact["tied"] for outcome in (two, restored) for fact in outcome.facts.values())
    assert not split.facts[0]["tied"]
    embedding = "model.embed_tokens.weight"
    both = split.gradients[embedding] + split.gradients["lm_head.weight"]
    torch.testing.assert_close(two.gradients[embedding], both, rtol=0, atol=1e-6 * largest(two.gradients))
    assert gap(restored.weights, two.weights) == 0
    exported = AutoModelForCausalLM.from_pretrained(two.export)
    assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    assert gap({name: parameter.detach() for name, parameter in exported.named_parameters()}, two.weights) == 0

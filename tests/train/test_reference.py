"""The reference: exactly the initial model, for ever; what its KL pulls to, in the loss and in the reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.config import TrainConfig, validated
from asyncrl.train.minibatch import minibatches_of
from asyncrl.train.model import Policy
from asyncrl.train.passes import reference_logprobs
from asyncrl.train.rank import RankTrainer
from asyncrl.train.reference import Reference
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch
from tests.tiny_model import make_tiny_model
from tests.tiny_moe import make_tiny_moe
from tests.train.plain_logprobs import assert_close, gradients_of, plain_model, plain_scores
from tests.train.test_routing_replay import batch as routed_batch
from tests.train.train_data import batch_of, first_gradient, inline_rank, random_batch, rollout, sequence, start, step_on, weights

IN_LOSS = {"kind": "in_loss", "coefficient": 0.2}
IN_REWARD = {"kind": "in_reward", "coefficient": 0.1}
ESTIMATORS = ("k3_importance", "k2", "k3_forward")
VOCABULARY = 16


@pytest.mark.parametrize("reference", [*({**IN_LOSS, "estimator": name} for name in ESTIMATORS), IN_REWARD], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_the_initial_weights_the_kl_is_exactly_0_and_pulls_nowhere(reference: dict[str, object], temperature: float, tiny: Path,
                                                                      tmp_path: Path) -> None:
    batch = random_batch(0, temperature=temperature)
    held, free = (inline_rank(tiny, tmp_path, reference=kind, microbatch_tokens=30, epochs=epochs)
                  for kind, epochs in ((reference, 1), ("none", 1)))
    metrics = step_on(held, batch).metrics.result()
    step_on(free, batch)
    assert metrics["reference/kl_k1/mean"] == metrics["reference/kl_k3/mean"] == 0.0
    assert metrics.get("reference/loss/mean", 0.0) == metrics.get("reference/penalty/mean", 0.0) == 0.0
    assert all(torch.equal(weight, weights(free)[name]) for name, weight in weights(held).items())


@pytest.mark.parametrize("logits_chunk", [1, 100])
def test_it_reads_logits_in_the_same_chunks(logits_chunk: int, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, reference=IN_LOSS, logits_chunk=logits_chunk)
    assert step_on(rank, random_batch(0)).metrics.result()["reference/kl_k3/mean"] == 0.0


def test_its_tokens_go_to_the_experts_that_were_recorded(tmp_path: Path) -> None:
    """Any other choice would be another model, at equal weights."""
    moe = make_tiny_moe(tmp_path / "moe")
    rank = inline_rank(moe, tmp_path, reference=IN_LOSS, correction="none", routing_replay=True)
    first, second = (step_on(rank, routed_batch()).metrics.result() for _ in range(2))
    assert first["train/routing_flips/frac"] > 0.4
    assert first["reference/kl_k3/mean"] == 0.0 < second["reference/kl_k3/mean"]


def test_the_reference_stays_while_the_policy_moves(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, reference=IN_LOSS, minibatches_per_step=2, epochs=2)
    packed = pack(random_batch(1))
    minibatches = minibatches_of(rank._trainee, packed)
    before = reference_logprobs(rank._trainee, minibatches)
    expected, _ = plain_scores(plain_model(tiny), packed)
    mask = torch.from_numpy(packed.loss_mask)
    torch.testing.assert_close(before.double()[mask], expected.detach()[mask], rtol=0, atol=1e-5)
    first, *_, last = (step_on(rank, packed).metrics.result() for _ in range(3))
    assert torch.equal(reference_logprobs(rank._trainee, minibatches), before)
    assert first["reference/kl_k3/mean"] == 0.0 < last["reference/kl_k3/mean"]
    assert float((scores_of(rank, packed).double() - expected.detach())[mask].abs().max()) > 1e-2
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in rank._trainee.reference.policy.parameters())


def scores_of(rank: RankTrainer, packed: PackedBatch) -> Tensor:
    logprobs = torch.zeros(len(packed.tokens))
    with torch.no_grad():
        for minibatch in minibatches_of(rank._trainee, packed):
            for inputs in minibatch.inputs:
                logprobs[inputs.places] = rank._trainee.policy(inputs)[0]
    return logprobs


def every_token(*, rollout_logprob: float = -math.log(VOCABULARY)) -> Batch:
    """One completion of one token for each token there is, as a policy that likes all alike would write them; equal rewards."""
    return batch_of(*(rollout(0, token, sequence([2, 3, 4], [token], logprobs=[rollout_logprob]), reward=1.0)
                      for token in range(VOCABULARY)))


def exact_kl(policy: torch.nn.Module, reference: Path, *, forward: bool) -> Tensor:
    def after_prompt(lm: torch.nn.Module) -> Tensor:
        return torch.log_softmax(lm(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False).logits[0, -1].double(), dim=-1)

    current, initial = after_prompt(policy), after_prompt(plain_model(reference)).detach()
    first, second = (initial, current) if forward else (current, initial)
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize(("estimator", "on_policy", "forward"), [("k3_importance", False, False), ("k3_importance", True, False),
                                                                  ("k2", True, False), ("k3_forward", True, True)])
def test_the_gradient_over_the_whole_vocabulary_is_that_of_the_divergence(estimator: str, on_policy: bool, forward: bool,
                                                                          tiny: Path, untied: Path, tmp_path: Path) -> None:
    """All tokens once: what a policy samples that is uniform. On-policy that is the current one too, its last norm scaled to 0."""
    rank = inline_rank(untied, tmp_path, reference=IN_LOSS | {"estimator": estimator}, correction="none")
    moved = plain_model(untied)
    with torch.no_grad():
        for lm in (rank._lm, moved):
            lm.model.norm.weight.mul_(0.0 if on_policy else 0.5)
            lm.model.layers[0].mlp.down_proj.weight.add_(0.1)
    ours = first_gradient(rank, every_token())
    assert_close(ours, gradients_of(moved, 0.2 * exact_kl(moved, untied, forward=forward)))
    if on_policy:
        other = gradients_of(moved, 0.2 * exact_kl(moved, untied, forward=not forward))
        assert max(float((ours[name] - gradient).abs().max()) for name, gradient in other.items()) > 1e-3


@pytest.mark.parametrize(("equal_rewards", "pulls"), [("pull", True), ("leave", False)])
def test_groups_of_equal_rewards_are_pulled_or_left_alone(equal_rewards: str, pulls: bool, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, reference=IN_LOSS | {"equal_rewards": equal_rewards}, correction="none")
    step_on(rank, random_batch(2))
    before = weights(rank)
    outcome = step_on(rank, every_token(rollout_logprob=-2.0))
    assert outcome.skipped != pulls
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(rank).items()) == pulls
    assert (outcome.metrics.result()["reference/loss/mean"] > 0.0) == pulls


def test_left_alone_are_those_groups_only(tiny: Path, tmp_path: Path) -> None:
    """A group of equal rewards beside one with signal changes nothing but the denominator."""
    signal = [rollout(1, n, sequence([2, 3], [4 + n, 5]), reward=float(n)) for n in range(2)]
    silent = [rollout(2, n, sequence([2, 3], [6 + n, 5]), reward=1.0) for n in range(2)]
    gradients = []
    for rollouts in ((signal), (signal + silent)):
        rank = inline_rank(tiny, tmp_path, reference=IN_LOSS | {"equal_rewards": "leave"}, correction="none",
                           loss={"kind": "decoupled_ppo", "aggregation": "token_sum"})
        with torch.no_grad():
            rank._lm.model.norm.weight.mul_(0.5)
        gradients.append(first_gradient(rank, batch_of(*rollouts)))
    assert_close(*gradients)


def moved_rank(model: Path, store: Path, **settings: object) -> RankTrainer:
    """Another policy than the reference."""
    rank = inline_rank(model, store, correction="none", **settings)
    with torch.no_grad():
        rank._lm.model.norm.weight.mul_(0.5)
    return rank


@pytest.mark.parametrize("advantages", ["dr_grpo", "reinforce_plus_plus"])
def test_in_the_reward_a_token_pays_for_itself_or_for_its_rollout(advantages: str, tiny: Path, tmp_path: Path) -> None:
    packed = pack(random_batch(3, temperature=0.8))
    rank = moved_rank(tiny, tmp_path, advantages=advantages, reference=IN_REWARD)
    current, initial = scores_of(rank, packed).double(), plain_scores(plain_model(tiny), packed)[0].detach()
    lost = np.where(packed.loss_mask, -0.1 * (current - initial).numpy(), 0.0)
    owners = packed.rollout_ids[packed.sequence_ids]
    sums = np.bincount(owners, weights=lost)
    if advantages == "dr_grpo":
        shaped = packed.rewards + sums
        means = np.array([shaped[packed.group_ids == group].mean() for group in packed.group_ids])
        expected = (shaped - means)[owners]
    else:
        expected = np.zeros(len(owners))
        for n in range(len(packed.rewards)):
            row = np.flatnonzero((owners == n) & packed.loss_mask)
            expected[row] = packed.rewards[n] + lost[row][::-1].cumsum()[::-1]
        kept = expected[packed.loss_mask]
        expected = (expected - kept.mean()) / kept.std(ddof=1)
    outcome = step_on(rank, packed)
    np.testing.assert_allclose(outcome.tokens.advantages.numpy()[packed.loss_mask], expected[packed.loss_mask], atol=1e-4)
    assert outcome.metrics.result()["reference/penalty/mean"] == pytest.approx(sums.mean(), rel=1e-4)


def test_a_hook_takes_the_policy_back_in_place_of_a_copy(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, reference=IN_LOSS)
    initial, inside = weights(rank), []

    @contextmanager
    def as_it_was(policy: Policy) -> Iterator[None]:
        learnt = weights(rank)
        inside.append(policy)
        load(rank, initial)
        yield
        load(rank, learnt)

    packed = pack(random_batch(4))
    step_on(rank, packed)
    copied = reference_logprobs(rank._trainee, minibatches_of(rank._trainee, packed))
    object.__setattr__(rank._trainee, "reference", Reference(rank._trainee.policy, untrained=as_it_was))
    assert torch.equal(reference_logprobs(rank._trainee, minibatches_of(rank._trainee, packed)), copied)
    assert inside == [rank._trainee.policy]


def load(rank: RankTrainer, saved: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in rank._lm.named_parameters():
            parameter.copy_(saved[name])


def test_a_restored_trainer_is_held_to_the_model_it_started_from(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")

    def trainer() -> Trainer:
        return Trainer(model, correction="none", reference=IN_LOSS, learning_rate=1e-2, processes=0)

    async def main() -> None:
        first, second = trainer(), trainer()
        for name, own in (("first", first), ("second", second)):
            await start(own, tmp_path / name)
        for version in range(2):
            await first.step(random_batch(version, version=version))
        await first.save(tmp_path / "saved")
        await second.restore(tmp_path / "saved")
        results = [(await own.step(random_batch(2, version=2))).metrics.result() for own in (first, second)]
        for name in ("reference/kl_k1/mean", "reference/kl_k3/mean", "reference/loss/mean", "train/loss/mean"):
            assert results[0][name] == results[1][name]
        assert results[0]["reference/kl_k3/mean"] > 0.0
        assert not any("reference" in file.name for file in (tmp_path / "saved").iterdir())

    asyncio.run(main())


def config(**sections: object) -> TrainConfig:
    return validated({"trainer": {"learning_rate": 1e-3}, "correction": "none", **sections})


@pytest.mark.parametrize(("sections", "field"), [
    ({"reference": {"kind": "in_loss", "coefficient": 0.1, "estimator": "k1"}}, "reference.estimator"),
    ({"reference": {"kind": "in_loss", "coefficient": 0.1, "estimator": "k3"}}, "reference.estimator"),
    ({"reference": {"kind": "in_loss", "coefficient": 0.0}}, "reference.coefficient"),
    ({"reference": IN_REWARD | {"estimator": "k2"}}, "reference.estimator"),
    ({"reference": IN_REWARD, "correction": {"kind": "custom", "proximal": "log_linear"}}, "reference.kind, correction.proximal"),
    ({"reference": IN_REWARD, "advantages": "maxrl"}, "reference.kind, advantages.kind"),
    ({"reference": IN_LOSS | {"equal_rewards": "leave"}, "advantages": "reinforce_plus_plus"}, "reference.equal_rewards, advantages.kind")])
def test_what_would_pull_nowhere_or_not_be_read_is_refused(sections: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert caught.value.field == field


@pytest.mark.parametrize(("reference", "passes"), [("none", False), (IN_LOSS, False), (IN_REWARD, True)])
def test_a_penalty_in_the_reward_needs_a_proximal_pass(reference: object, passes: bool) -> None:
    assert config(reference=reference).has_proximal_pass == passes

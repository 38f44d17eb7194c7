"""PPO's critic: what it learns, against a plain loop; when it alone learns; that it is saved and never published."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.channel import Request
from asyncrl.errors import CheckpointError
from asyncrl.train.batch import pack
from asyncrl.train.minibatch import minibatches_of
from asyncrl.train.passes import critic_values
from asyncrl.train.rank import RankTrainer
from asyncrl.train.trainer import Trainer
from asyncrl.types import Batch, SequenceBuilder, Status
from tests.timeless import timeless
from tests.train.plain_critic import EPS, LEARNING_RATE, Discount, PlainCritic
from tests.train.train_data import batch_of, inline_rank, random_batch, rollout, sequence, start, step_on, weights

DISCOUNT = Discount(gamma=0.9, lam=0.8)
CRITIC = {"learning_rate": LEARNING_RATE, "max_grad_norm": 1e9}
GAE = {"kind": "gae", "gamma": DISCOUNT.gamma, "lam": DISCOUNT.lam, "critic": CRITIC}


def gae(**critic: object) -> dict[str, object]:
    return GAE | {"critic": CRITIC | critic}


def critic_weights(rank: RankTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank._trainee.critic.model.named_parameters()}


def several_turns(seed: int) -> Batch:
    """Tools write between the turns and after the last; a failed rollout, a masked one; groups of one."""
    random = np.random.default_rng(seed)
    rollouts = []
    for group, size in enumerate((3, 1, 2, 1)):
        prompt = random.integers(2, 16, 4).tolist()
        for index in range(size):
            builder = SequenceBuilder(prompt)
            for turn in range(int(random.integers(1, 4))):
                count = int(random.integers(1, 5))
                builder.sampled(random.integers(2, 16, count).astype(np.int32), logprobs=random.normal(-2.5, 0.3, count).astype(np.float32),
                                policy_version=0, kv_fresh=True, turn=turn)
                builder.given(random.integers(2, 16, int(random.integers(0, 4))).tolist(), turn=turn)
            failed = group == 0 and index == 2
            rollouts.append(rollout(group, index, builder.build(), reward=float(random.normal()),
                                    status=Status.ENV_ERROR if failed else Status.STOP))
    return batch_of(*rollouts)


@pytest.mark.parametrize("microbatch_tokens", [4096, 25])
@pytest.mark.parametrize("whiten", [False, True])
def test_critic_and_advantages_are_those_of_a_plain_loop(whiten: bool, microbatch_tokens: int, untied: Path, tmp_path: Path) -> None:
    """Two steps, so that values and clip are those of a critic that has learnt something; two minibatches, two epochs."""
    rank = inline_rank(untied, tmp_path, advantages=gae(value_clip=0.05, epochs=2) | {"whiten": whiten}, correction="none", eps=EPS,
                       minibatches_per_step=2, microbatch_tokens=microbatch_tokens)
    plain, clipped = PlainCritic(untied), []
    for seed in range(2):
        packed = pack(several_turns(seed))
        owners = packed.group_ids[packed.rollout_ids]
        trained = [n for n in range(len(owners)) if packed.loss_mask[packed.cu_seqlens[n]:packed.cu_seqlens[n + 1]].any()]
        shares = [[n for n in trained if owners[n] in groups] for groups in ((0, 1), (2, 3))]
        advantages, returns = plain.step(packed, discount=DISCOUNT, clip=0.05, shares=shares * 2)
        outcome = step_on(rank, packed)
        if whiten:
            advantages = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(outcome.tokens.advantages.numpy()[packed.loss_mask], advantages, atol=2e-4)
        metrics = outcome.metrics.result()
        assert metrics["critic/returns/mean"] == pytest.approx(returns.mean(), abs=1e-5)
        assert rank._trainee.critic.optimizer.updates == plain.updates
        clipped.append(metrics["critic/clipped/frac"])
    assert max(clipped) > 0.0
    expected = dict(plain.named_parameters())
    moved = max(float((expected[name] - before).detach().abs().max()) for name, before in PlainCritic(untied).named_parameters())
    for name, parameter in critic_weights(rank).items():
        torch.testing.assert_close(parameter.double(), expected[name].detach(), rtol=0, atol=1e-3 * moved + 1e-7)


def test_the_reward_comes_with_the_last_sampled_token_whatever_is_written_after_it(tiny: Path, tmp_path: Path) -> None:
    builder = SequenceBuilder([2, 3])
    builder.sampled(np.array([4, 5], np.int32), logprobs=np.full(2, -1.0, np.float32), policy_version=0, kv_fresh=True, turn=0)
    builder.given([6, 7, 8], turn=0)
    batch = batch_of(rollout(0, 0, builder.build(), reward=2.0))
    outcome = step_on(inline_rank(tiny, tmp_path, advantages=gae() | {"whiten": False}, correction="none"), batch)
    # no value yet: discounted returns, λ or not
    np.testing.assert_allclose(outcome.tokens.advantages.numpy(), [0, 0, 2.0 * 0.9 * 0.8, 2.0, 0, 0, 0], rtol=1e-6)


def test_a_critic_learns_a_batch_and_its_advantages_shrink(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, advantages=gae(value_clip=None) | {"whiten": False, "gamma": 1.0}, learning_rate=1e-9)
    results = [step_on(rank, random_batch(0)).metrics.result() for _ in range(40)]
    # first tokens of a group are all drawn after the same prompt, whatever they earn: not everything can be known
    assert results[-1]["critic/value_loss/mean"] < 0.3 * results[0]["critic/value_loss/mean"]
    assert results[0]["critic/explained_variance/last"] == pytest.approx(0.0, abs=1e-6)
    assert results[-1]["critic/explained_variance/last"] > 0.7
    assert results[0]["critic/values/mean"] == 0.0


def test_in_its_warm_up_the_critic_moves_alone(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, advantages=gae(warm_up_steps=2))
    before, untrained = weights(rank), critic_weights(rank)
    for version in range(3):
        outcome = step_on(rank, random_batch(version, version=version))
        moved = any(not torch.equal(weight, before[name]) for name, weight in weights(rank).items())
        assert moved == (version == 2)
        assert not outcome.skipped
        assert (outcome.trained_tokens > 0) == (version == 2)
        assert ("train/loss/mean" in outcome.metrics.result()) == (version == 2)
        assert any(not torch.equal(weight, untrained[name]) for name, weight in critic_weights(rank).items())
    assert (rank._trainee.optimizer.updates, rank._trainee.critic.optimizer.updates) == (1, 3)


def test_a_value_that_is_not_finite_moves_nothing(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, advantages=GAE)
    with torch.no_grad():
        rank._trainee.critic.model.head.bias.fill_(float("nan"))
    before = weights(rank)
    outcome = step_on(rank, random_batch(0))
    assert (outcome.nonfinite, outcome.skipped, outcome.trained_tokens) == (True, True, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(rank).items())
    assert rank._trainee.critic.optimizer.updates == 0


def test_a_gradient_of_the_critic_that_is_not_finite_is_not_stepped_on_and_is_counted(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, advantages=gae(epochs=2))
    critic, calls = rank._trainee.critic, itertools.count()
    # the values, the first update, then the second
    critic.model.lm.norm.register_forward_hook(lambda _module, _inputs, hidden: hidden * (float("nan") if next(calls) == 2 else 1.0))
    outcome = step_on(rank, random_batch(0))
    assert outcome.nonfinite
    assert not outcome.skipped
    assert critic.optimizer.updates == 1
    assert "critic/value_loss/mean" not in outcome.metrics.result()
    assert all(parameter.isfinite().all() for parameter in critic.model.parameters())


def test_the_critic_is_saved_and_never_published_or_exported(untied: Path, tmp_path: Path) -> None:
    rank = inline_rank(untied, tmp_path, advantages=GAE, frozen=["norm"], learning_rate_groups=[{"match": "embed", "factor": 2.0}])
    names = {name for name in rank._tensors() if name.startswith("critic/")}
    assert {"critic/model/head.weight", "critic/exp_avg/head.bias", "critic/updates", "critic/exp_avg/lm.norm.weight"} <= names
    assert not any("lm_head" in name for name in names)
    assert all(name.removeprefix("model/") in dict(rank._lm.named_parameters()) for name in rank._tensors() if name.startswith("model/"))
    assert {piece.name for piece in rank._bits().pieces} <= set(dict(rank._lm.named_parameters()))
    rank.export(Request("export", body={"folder": str(tmp_path / "export")}))
    assert inline_rank(tmp_path / "export", tmp_path)._lm.config == rank._lm.config


def test_a_restored_critic_goes_on_as_the_saved_one_would_have(tiny: Path, tmp_path: Path) -> None:
    def trainer(advantages: object) -> Trainer:
        return Trainer(tiny, correction="none", advantages=advantages, learning_rate=1e-2, processes=0)

    async def main() -> None:
        first, second, other = trainer(gae(epochs=2)), trainer(gae(epochs=2)), trainer("grpo")
        for name, own in (("first", first), ("second", second), ("other", other)):
            await start(own, tmp_path / name)
        for version in range(2):
            await first.step(random_batch(version, version=version))
        await first.save(tmp_path / "saved")
        await second.restore(tmp_path / "saved")
        results = [[(await own.step(random_batch(v, version=v))).metrics.result() for v in (2, 3)] for own in (first, second)]
        for before, after in zip(*results, strict=True):
            assert before.keys() == after.keys()
            assert timeless(before) == timeless(after)
        with pytest.raises(CheckpointError, match="critic/"):
            await other.restore(tmp_path / "saved")
        await other.save(tmp_path / "without")
        with pytest.raises(CheckpointError, match="critic/"):
            await second.restore(tmp_path / "without")

    asyncio.run(main())


def test_values_are_of_what_comes_before_a_token(tiny: Path, tmp_path: Path) -> None:
    """Two completions that part at their second token: the values of the first two are the same, that of the third is not."""
    rank = inline_rank(tiny, tmp_path, advantages=GAE)
    with torch.no_grad():
        rank._trainee.critic.model.head.weight.fill_(0.1)
    packed = pack(batch_of(*(rollout(0, n, sequence([2, 3], [4, 5 + n, 6]), reward=float(n)) for n in range(2))))
    first, second = critic_values(rank._trainee, minibatches_of(rank._trainee, packed)).view(2, 5)
    assert torch.equal(first[:4], second[:4])
    assert first[4] != second[4]
    assert first[:2].tolist() == [0.0, 0.0]


def test_ppo_improves_a_policy_with_groups_of_one(tiny: Path, tmp_path: Path) -> None:
    """Rewarded for the share of one token among six; rollouts are the policy's own."""
    rank = inline_rank(tiny, tmp_path, advantages=gae(learning_rate=1e-2) | {"gamma": 1.0, "lam": 0.95}, correction="none",
                       learning_rate=3e-3, epochs=2, max_grad_norm=1.0)
    generator, rewards = torch.Generator().manual_seed(0), []
    for version in range(10):
        batch = own_rollouts(rank, generator, version=version)
        rewards.append(np.mean([r.reward for r in batch.rollouts]))
        step_on(rank, batch)
    assert rewards[0] < 0.2
    assert np.mean(rewards[-3:]) > 0.9


@torch.no_grad()
def own_rollouts(rank: RankTrainer, generator: torch.Generator, *, version: int, count: int = 24, length: int = 6) -> Batch:
    tokens = torch.tensor([2, 3]).repeat(count, 1)
    logprobs = torch.zeros(count, 0)
    lm = rank._lm
    used, _ = lm.config._attn_implementation, lm.set_attn_implementation("eager")
    for _ in range(length):
        scores = lm(input_ids=tokens, use_cache=False).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens, logprobs = torch.cat([tokens, drawn], 1), torch.cat([logprobs, scores.gather(1, drawn)], 1)
    lm.set_attn_implementation(used)
    rows = zip(tokens[:, 2:].tolist(), logprobs.tolist(), strict=True)
    return batch_of(*(rollout(n, 0, sequence([2, 3], row, logprobs=own, version=version), reward=row.count(7) / length)
                      for n, (row, own) in enumerate(rows)), version=version)

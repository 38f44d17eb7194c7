"""The advantages a trainer takes: each kind of the configuration against rollouts taken one by one."""

from pathlib import Path

import numpy as np
import pytest

from asyncrl.train.advantages import overlong_penalties, shaping_metrics, token_advantages
from asyncrl.train.batch import PackedBatch, pack
from asyncrl.train.config import TrainConfig, validated
from asyncrl.types import Batch, Rollout, SequenceBuilder, Status
from tests.tiny_model import make_tiny_model
from tests.train.train_data import batch_of, inline_rank, rollout, step_on

SOFT = {"kind": "soft", "max_tokens": 9, "cache_tokens": 6, "weight": 0.5}
KINDS: list[dict[str, object]] = [
    {"kind": "grpo"}, {"kind": "grpo", "unbiased_std": False}, {"kind": "dr_grpo"}, {"kind": "rloo"}, {"kind": "maxrl"}, {"kind": "opo"},
    {"kind": "reinforce_plus_plus"}, {"kind": "reinforce_plus_plus", "gamma": 0.7}, {"kind": "reinforce_plus_plus_baseline"}]
KINDS += [kind | {"overlong": SOFT} for kind in KINDS if kind["kind"] != "maxrl"]


def config_of(advantages: dict[str, object]) -> TrainConfig:
    return validated({"trainer": {"learning_rate": 1e-3, "processes": 0}, "advantages": advantages, "correction": "none"})


def tangled(seed: int) -> Batch:
    """Groups of 1 to 4, one of equal rewards; turns with environment tokens between; forks, masked ones too; failures."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for group in range(4):
        for index in range(int(rng.integers(1, 5))):
            sequences = []
            for fork in range(int(rng.integers(1, 3))):
                builder = SequenceBuilder([1, 2])
                for turn in range(int(rng.integers(1, 4))):
                    count = int(rng.integers(1, 4))
                    builder.sampled(np.full(count, 3, np.int32), logprobs=np.full(count, -1.0, np.float32), policy_version=0, kv_fresh=True,
                                    turn=turn)
                    builder.given([4] * int(rng.integers(0, 3)), turn=turn)
                sequences.append(builder.build().masked() if fork and rng.random() < 0.3 else builder.build())
            reward = 0.7 if group == 2 else float(rng.integers(0, 3)) / 2
            status = Status.ENV_ERROR if rng.random() < 0.2 else Status.STOP
            rollouts.append(rollout(group, index, *sequences, reward=reward, status=status))
    return batch_of(*rollouts)


def one_by_one(batch: Batch, settings: dict[str, object]) -> list[np.ndarray]:
    """The advantages of each sequence's loss tokens, in order, from rollouts as they are."""
    good = [(group.group_id, r) for group in batch.groups for r in group.rollouts if not r.status.is_error]
    shaped = {id(r): r.reward + _penalty(r, settings.get("overlong")) for _, r in good}
    if settings["kind"] == "reinforce_plus_plus":
        gamma = settings.get("gamma", 1.0)
        found = [[shaped[id(r)] * gamma ** (count - 1 - t) for t in range(count)] for _, r in good for count in _loss_tokens(r)]
        return _whitened(found)
    found = []
    for group, r in good:
        others = [other for g, other in good if g == group]
        rewards, lengths = np.array([shaped[id(other)] for other in others]), [sum(_loss_tokens(other)) for other in others]
        found += [[_against(shaped[id(r)], rewards, lengths, settings)] * count for count in _loss_tokens(r)]
    if settings["kind"] == "reinforce_plus_plus_baseline":
        has_signal = [np.ptp([shaped[id(o)] for g, o in good if g == group]) > 0 for group, r in good for _ in r.sequences]
        return [own * signal for own, signal in zip(_whitened(found), has_signal, strict=True)]
    return [np.array(own) for own in found]


def _against(reward: float, rewards: np.ndarray, lengths: list[int], settings: dict[str, object]) -> float:
    if np.ptp(rewards) == 0:
        return 0.0
    centred, rest = reward - rewards.mean(), (rewards.sum() - reward) / (len(rewards) - 1)
    std = rewards.std(ddof=1 if settings.get("unbiased_std", True) else 0)
    return {"grpo": centred / (std + 1e-6), "dr_grpo": centred, "reinforce_plus_plus_baseline": centred, "rloo": reward - rest,
            "maxrl": centred / rewards.mean(), "opo": reward - np.repeat(rewards, lengths).mean()}[settings["kind"]]


def _whitened(rows: list[list[float]]) -> list[np.ndarray]:
    tokens = np.concatenate([np.array(row) for row in rows])
    return [(np.array(row) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for row in rows]


def _penalty(r: Rollout, overlong: dict[str, float] | None) -> float:
    written = sum(int((sequence.policy_versions >= 0).sum()) for sequence in r.sequences)
    return 0.0 if overlong is None else -overlong["weight"] * min(1.0, max(0.0, (written - 3) / 6))


def _loss_tokens(r: Rollout) -> list[int]:
    return [int(sequence.loss_mask.sum()) for sequence in r.sequences]


def by_sequence(batch: PackedBatch, advantages: np.ndarray) -> list[np.ndarray]:
    """At the loss tokens of each sequence of a rollout without error."""
    rows = np.split(np.arange(len(batch.tokens)), batch.cu_seqlens[1:-1])
    return [advantages[row[batch.loss_mask[row]]] for row, owner in zip(rows, batch.rollout_ids, strict=True) if batch.valid[owner]]


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: "-".join([str(settings["kind"]), *list(settings)[1:]]))
def test_every_kind_is_what_it_says_of_rollouts_one_by_one(settings: dict[str, object]) -> None:
    for seed in range(12):
        batch = tangled(seed)
        packed = pack(batch)
        got, wanted = by_sequence(packed, token_advantages(config_of(settings).advantages, packed)), one_by_one(batch, settings)
        assert len(got) == len(wanted)
        for own, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_a_penalty_counts_what_the_policy_sampled_and_is_told() -> None:
    """2, 6 and 40 sampled tokens; the limit of the last is far behind. The failed rollout has none in the mean."""
    rows = [SequenceBuilder([1] * 30) for _ in range(4)]
    for builder, count in zip(rows, (2, 6, 40, 40), strict=True):
        builder.sampled(np.full(count, 3, np.int32), logprobs=np.full(count, -1.0, np.float32), policy_version=0, kv_fresh=True, turn=0)
    statuses = [Status.STOP, Status.STOP, Status.LENGTH, Status.ENV_ERROR]
    packed = pack(batch_of(*(rollout(0, n, row.build(), reward=1.0, status=status)
                             for n, (row, status) in enumerate(zip(rows, statuses, strict=True)))))
    shaped = config_of({"kind": "dr_grpo", "overlong": SOFT}).advantages
    np.testing.assert_allclose(overlong_penalties(shaped, packed)[:3], [0.0, -0.25, -0.5])
    assert shaping_metrics(shaped, packed).result() == {"train/overlong_penalty/mean": pytest.approx(-0.25)}
    assert shaping_metrics(config_of({"kind": "dr_grpo"}).advantages, packed).result() == {}


def test_a_step_trains_by_them_and_tells_the_penalty(tmp_path: Path) -> None:
    packed = pack(tangled(3))
    rank = inline_rank(make_tiny_model(tmp_path / "model"), tmp_path, advantages={"kind": "opo", "overlong": SOFT}, correction="none")
    wanted = token_advantages(rank._trainee.config.advantages, packed)
    assert np.ptp(wanted) > 0
    outcome = step_on(rank, packed)
    assert outcome.tokens is not None
    np.testing.assert_array_equal(outcome.tokens.advantages.numpy(), wanted)
    assert -0.5 <= outcome.metrics.result()["train/overlong_penalty/mean"] < 0.0

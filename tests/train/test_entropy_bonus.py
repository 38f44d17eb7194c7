"""The entropy bonus inside a step: its gradient is that of the entropies of plain logits, on the tokens a correction keeps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.train.batch import pack
from asyncrl.types import Batch
from tests.train.plain_logprobs import assert_close, gradients_of, plain_model, plain_scores
from tests.train.train_data import batch_of, first_gradient, inline_rank, random_batch, rollout, sequence, step_on

COEFFICIENT = 0.03


def equal_rewards(*, temperature: float = 0.7) -> Batch:
    """No advantage: what moves the policy is the bonus alone."""
    random = np.random.default_rng(0)
    return batch_of(*(rollout(group, n, sequence([2 + group, 3], random.integers(1, 16, 2 + 3 * n + group).tolist()), reward=0.5,
                              temperature=temperature) for group in range(2) for n in range(3)))


@pytest.mark.parametrize("loss", [{"kind": "decoupled_ppo"}, {"kind": "gspo"}, {"kind": "vespo", "aggregation": "token_sum"},
                                  {"kind": "reinforce", "aggregation": "dr_grpo", "max_tokens": 6}])
def test_the_gradient_is_that_of_the_entropy_of_plain_logits(loss: dict[str, object], tiny: Path, tmp_path: Path) -> None:
    packed = pack(equal_rewards())
    rank = inline_rank(tiny, tmp_path, loss=loss | {"entropy_coefficient": COEFFICIENT}, correction="none", microbatch_tokens=20)
    lm = plain_model(tiny)
    _, entropy = plain_scores(lm, packed)
    mask, owners = torch.from_numpy(packed.loss_mask), torch.from_numpy(packed.sequence_ids)
    sums, lengths = (torch.zeros(6, dtype=torch.float64).index_add(0, owners, values) for values in (entropy * mask, mask.double()))
    bonus = {"decoupled_ppo": sums.sum() / lengths.sum(), "gspo": (sums / lengths).mean(), "vespo": sums.sum(),
             "reinforce": sums.sum() / (6 * 6)}[str(loss["kind"])]
    assert_close(first_gradient(rank, packed), gradients_of(lm, -COEFFICIENT * bonus))


@pytest.mark.parametrize("kind", ["decoupled_ppo", "gspo"])
def test_it_adds_to_the_policy_gradient_and_to_the_loss(kind: str, tiny: Path, tmp_path: Path) -> None:
    with_bonus, without, bonus = (
        inline_rank(tiny, tmp_path, loss={"kind": kind, "aggregation": "token_mean", "entropy_coefficient": coefficient}, advantages=how)
        for coefficient, how in ((COEFFICIENT, "grpo"), (0.0, "grpo"), (COEFFICIENT, "dr_grpo")))
    batch = random_batch(3)
    flat = batch_of(*(rollout(r.group_id, r.index, *r.sequences, reward=0.0) for r in batch.rollouts))
    parts = [first_gradient(rank, given) for rank, given in ((without, batch), (bonus, flat))]
    assert_close(first_gradient(with_bonus, batch), {name: part.double() + parts[1][name] for name, part in parts[0].items()})

    alone, added = (step_on(inline_rank(tiny, tmp_path, loss={"kind": kind, "aggregation": "token_mean", "entropy_coefficient": c}), batch)
                    .metrics.result() for c in (0.0, COEFFICIENT))
    assert "train/entropy_bonus/mean" not in alone
    assert added["train/entropy_bonus/mean"] == pytest.approx(COEFFICIENT * added["train/entropy/mean"], rel=1e-5)
    assert added["train/loss/mean"] == pytest.approx(alone["train/loss/mean"] - added["train/entropy_bonus/mean"], rel=1e-4)


def test_what_a_correction_drops_has_no_bonus(tiny: Path, tmp_path: Path) -> None:
    dropping = {"kind": "custom", "level": "none", "mask_high": 1e-6}
    rank = inline_rank(tiny, tmp_path, loss={"kind": "decoupled_ppo", "entropy_coefficient": COEFFICIENT}, correction=dropping)
    outcome = step_on(rank, random_batch(1))
    assert outcome.skipped
    assert outcome.metrics.result()["train/entropy_bonus/mean"] == 0.0


def test_entropy_rises_under_the_bonus(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path, loss={"kind": "decoupled_ppo", "entropy_coefficient": 0.1}, correction="none")
    entropies = [step_on(rank, equal_rewards()).metrics.result()["train/entropy/mean"] for _ in range(6)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.1

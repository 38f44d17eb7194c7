"""Logprobs over the set a token was sampled among: values, gradients, memory, and a ratio of 1 where nothing changed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.channel import Request
from asyncrl.records import KeptSets, TokenRecords
from asyncrl.train.kept_rows import KeptRows
from asyncrl.train.logprobs import Head, Predictions, token_logprobs
from asyncrl.types import Sequence, SequenceBuilder
from tests.train.test_logprobs import Case as WholeCase
from tests.train.test_logprobs import D, LargestTensor, P, V
from tests.train.train_data import batch_of, inline_rank, rollout, sequence, step_on

CPU = torch.device("cpu")
LOGITS = [2.0, 1.0, 0.0, -1.0]


def of_logits(kept: KeptSets | None, *, targets: list[int]) -> tuple[Tensor, Tensor]:
    predictions = Predictions(torch.tensor(targets), torch.ones(len(targets)), KeptRows.of(kept, CPU))
    return token_logprobs(torch.tensor([LOGITS] * len(targets)), head=Head(torch.eye(4), None), predictions=predictions)


def test_two_tokens_of_four_hold_088_of_the_mass() -> None:
    """p = softmax([2, 1, 0, −1]), the first two kept: S = 0.8808, log S = −0.1269."""
    whole, _ = of_logits(None, targets=[0, 1])
    kept, entropy = of_logits(KeptSets.of([np.array([1, 0], np.int32)] * 2), targets=[0, 1])
    assert (whole - kept).tolist() == pytest.approx([-0.1269, -0.1269], abs=1e-4)
    p = 1 / (1 + math.exp(-1))
    assert kept.exp().tolist() == pytest.approx([p, 1 - p])
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2)


def test_a_set_of_one_is_certain() -> None:
    logprobs, entropy = of_logits(KeptSets.of([np.array([2], np.int32)]), targets=[2])
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


def test_sets_that_are_the_whole_vocabulary_change_no_bit() -> None:
    whole = of_logits(None, targets=[0, 3])
    for kept in (KeptSets.of([np.empty(0, np.int32)] * 2), KeptSets.of([np.arange(4, dtype=np.int32)] * 2)):
        assert all(torch.equal(ours, plain) for ours, plain in zip(of_logits(kept, targets=[0, 3]), whole, strict=True))


class Case(WholeCase):
    """Every third prediction has a set of its own, of 1 to 40 ids."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__(bias=bias)
        random = np.random.default_rng(1)
        sets = [np.empty(0, np.int32)] * P
        for row in range(0, P, 3):
            others = random.choice(V, int(random.integers(0, 40)), replace=False)
            sets[row] = np.union1d(others, [int(self.predictions.targets[row])]).astype(np.int32)
        self.outside = torch.zeros(P, V, dtype=torch.bool)
        for row, ids in enumerate(sets):
            if len(ids):
                self.outside[row] = True
                self.outside[row, torch.from_numpy(ids).long()] = False
        self.predictions = Predictions(self.predictions.targets, self.predictions.temperatures, KeptRows.of(KeptSets.of(sets), CPU))

    def plain(self) -> list[Tensor]:
        hidden, weight, *bias = (x.double() for x in (self.hidden, *self.layer.parameters()))
        logits = (hidden @ weight.t() + (bias[0] if bias else 0)) / self.predictions.temperatures.double()[:, None]
        everything = torch.log_softmax(logits.masked_fill(self.outside, -torch.inf), dim=-1)
        logprobs = everything.gather(1, self.predictions.targets[:, None])[:, 0]
        entropy = -torch.where(self.outside, 0.0, everything.exp() * everything.masked_fill(self.outside, 0.0)).sum(dim=-1)
        return [logprobs, entropy, *self.gradients(self.loss(logprobs, entropy, slice(None)))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 64, 1000])
@pytest.mark.parametrize("way", [WholeCase.recomputed, WholeCase.in_the_forward])
def test_values_and_gradients_are_those_of_masked_logits(way, rows: int, bias: bool) -> None:
    case = Case(bias=bias)
    for ours, plain in zip(way(case, rows * V), case.plain(), strict=True):
        torch.testing.assert_close(ours.double(), plain.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [WholeCase.recomputed, WholeCase.in_the_forward])
def test_a_chunk_bounds_the_mask_too(way) -> None:
    case = Case(bias=False)
    with LargestTensor() as largest:
        way(case, 10 * V)
    assert largest.elements == 10 * V


def test_every_way_gives_the_same_bits() -> None:
    case = Case(bias=True)
    with torch.no_grad():
        alone = token_logprobs(case.hidden, head=Head.of(case.layer, chunk_logits=7 * V), predictions=case.predictions)
    for way in (Case.recomputed, Case.in_the_forward):
        assert all(torch.equal(ours, other) for ours, other in zip(way(case, 7 * V), alone, strict=False))


@pytest.mark.parametrize("chunk_rows", [4, P])
def test_finite_differences_agree(chunk_rows: int) -> None:
    case = Case(bias=False)
    chosen = torch.arange(0, P, 9)
    weights = torch.linspace(0.5, 1.5, P)

    def total(hidden: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(hidden, head=Head.of(case.layer, chunk_logits=chunk_rows * V), predictions=case.predictions)
        return (weights * (logprobs + entropy)).double().sum()

    gradient, = torch.autograd.grad(total(case.hidden), case.hidden)
    for row in chosen.tolist():
        step = torch.zeros(P, D)
        step[row, row % D] = 1e-2
        slope = float((total(case.hidden + step) - total(case.hidden - step)).detach() / 2e-2)
        assert float(gradient[row, row % D]) == pytest.approx(slope, rel=2e-2, abs=2e-3)


def sampled_among(rank, prompt: list[int], completion: list[int], kept: KeptSets | None, *, temperature: float) -> Sequence:
    """A sequence with the logprobs that plain forwards of the rank's own weights give over the kept sets."""
    with torch.no_grad():
        logits = rank._lm(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False,
                          segments=_alone(len(prompt) + len(completion))).logits[0, len(prompt) - 1:-1]
    logits = logits / temperature
    if kept is not None:
        for row, start, end in zip(logits, kept.offsets[:-1], kept.offsets[1:], strict=True):
            if end > start:
                outside = np.setdiff1d(np.arange(len(row)), kept.ids[start:end])
                row[torch.from_numpy(outside)] = -torch.inf
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()
    builder = SequenceBuilder(prompt)
    builder.sampled(np.array(completion, np.int32), logprobs=logprobs, policy_version=0, kv_fresh=True, turn=0, records=TokenRecords(kept))
    return builder.build()


def _alone(length: int):
    from asyncrl.train.attention import PackedSegments
    return PackedSegments(((1, length),), None, None)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_unchanged_weights_give_a_ratio_of_1_with_sets_and_not_without(tiny: Path, tmp_path: Path, temperature: float) -> None:
    """A batch of which some rollouts were truncated and some were not, in one packed forward with a shared prompt."""
    rank = inline_rank(tiny, tmp_path, epochs=2)
    kept = KeptSets.of([np.array(row, np.int32) for row in ([3, 5, 9], [], [6, 2])])
    prompt = [4, 7, 7]
    truncated = sampled_among(rank, prompt, [5, 11, 6], kept, temperature=temperature)
    whole = sampled_among(rank, prompt, [8, 9], None, temperature=temperature)

    lost = sequence(prompt, [5, 11, 6], logprobs=truncated.rollout_logprobs[3:].tolist())

    def log_ratios(first: Sequence) -> np.ndarray:
        batch = batch_of(rollout(0, 0, first, reward=1.0, temperature=temperature), rollout(0, 1, whole, temperature=temperature))
        tokens = step_on(inline_rank(tiny, tmp_path, epochs=2), batch).tokens
        return (tokens.proximal_logprobs - tokens.rollout_logprobs)[tokens.loss_mask].numpy()

    np.testing.assert_allclose(log_ratios(truncated), 0.0, atol=2e-6)
    metrics = step_on(rank, batch_of(rollout(0, 0, truncated, reward=1.0), rollout(0, 1, whole))).metrics.result()
    assert (metrics["train/truncated/frac"], metrics["train/kept_ids/mean"]) == (2 / 5, 5 / 2)
    without = log_ratios(lost)
    assert (without[[0, 2]] < -0.2).all(), "the kept mass, at the truncated tokens"
    np.testing.assert_allclose(without[[1, 3, 4]], 0.0, atol=2e-6)


@pytest.mark.parametrize("loss", ["decoupled_ppo", "gspo"])
def test_the_forward_that_trains_and_the_pass_before_it_agree_to_the_bit(tiny: Path, tmp_path: Path, loss: str) -> None:
    rank = inline_rank(tiny, tmp_path, epochs=2, learning_rate=1e-30, loss=loss)
    kept = KeptSets.of([np.array(row, np.int32) for row in ([3, 5, 9], [], [6, 2])])
    batch = batch_of(rollout(0, 0, sampled_among(rank, [4, 7], [5, 11, 6], kept, temperature=1.0), reward=1.0),
                     rollout(0, 1, sequence([4, 7], [8, 9])))
    metrics = step_on(rank, batch).metrics.result()
    assert (metrics["correction/update_ratio/min"], metrics["correction/update_ratio/max"]) == (1.0, 1.0)


def test_score_is_over_the_sets(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path)
    one = sampled_among(rank, [4, 7], [5, 6], KeptSets.of([np.array([5, 8], np.int32), np.array([6, 1, 2], np.int32)]), temperature=0.8)
    reply = rank.score(Request(0, "score", {}, {"tokens": one.tokens, "cu_seqlens": np.array([0, 4]),
                                                "temperatures": np.array([0.8], np.float32), **one.records.arrays()}))
    np.testing.assert_allclose(reply.arrays["logprobs"][2:], one.rollout_logprobs[2:], atol=1e-6)

"""Noise on the inline engine's logits: a mismatch of known size, the same bits every time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.rollout.engine import GenerationRequest
from asyncrl.rollout.inline_wave import Row, Wave
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.types import Sampling

VOCABULARY, TOKENS = 12, 40
LOGITS = np.random.default_rng(0).normal(scale=1.5, size=VOCABULARY).astype(np.float32)


class SameLogits:
    """A model that says the same of every token."""

    device = torch.device("cpu")
    config = None

    def __call__(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=torch.from_numpy(LOGITS).expand(len(inputs["input_ids"]), 1, VOCABULARY))


def written(*seeds: int, noise: float, temperature: float = 1.0, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of requests that share a wave, one for each seed."""
    monkeypatch.setattr("asyncrl.rollout.inline_wave.DynamicCache", lambda config: object())
    sampling = Sampling(temperature=temperature, max_new_tokens=TOKENS)
    rows = [Row(GenerationRequest(str(seed), np.array([1], np.int32), sampling, seed=seed), TOKENS, Mailbox()) for seed in seeds]
    wave = Wave(SameLogits(), rows, eos_tokens=frozenset(), threads=1, logit_noise=noise)  # type: ignore[arg-type]
    while wave.rows:
        wave.step()
    return [(row.tokens[1:], row.logprobs) for row in rows]


def by_definition(seed: int, *, noise: float, temperature: float) -> tuple[list[int], list[float]]:
    """In NumPy: of each token the draw, then the noise, from the request's own stream."""
    stream, tokens, logprobs = np.random.default_rng(seed), [], []
    for _ in range(TOKENS):
        draw = stream.random()
        noisy = (LOGITS + np.float32(noise) * stream.standard_normal(VOCABULARY, dtype=np.float32)).astype(np.float64) / temperature
        logprob = noisy - np.log(np.exp(noisy - noisy.max()).sum()) - noisy.max()
        tokens.append(int(np.searchsorted(np.exp(logprob).cumsum(), draw, side="right")))
        logprobs.append(float(logprob[tokens[-1]]))
    return tokens, logprobs


@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_are_of_the_noisy_distribution(noise: float, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens, logprobs), = written(7, noise=noise, temperature=temperature, monkeypatch=monkeypatch)
    expected_tokens, expected_logprobs = by_definition(7, noise=noise, temperature=temperature)
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6)


def test_the_noise_of_a_request_does_not_depend_on_who_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, = written(7, noise=0.5, monkeypatch=monkeypatch)
    beside = written(3, 7, 9, noise=0.5, monkeypatch=monkeypatch)
    assert beside[1] == alone
    assert beside[0] != beside[1] != beside[2]


def test_without_noise_nothing_is_drawn_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens, _), = written(7, noise=0.0, monkeypatch=monkeypatch)
    stream, probs = np.random.default_rng(7), np.exp(LOGITS.astype(np.float64))
    cumulative = (probs / probs.sum()).cumsum()
    assert tokens == [int(np.searchsorted(cumulative, stream.random(), side="right")) for _ in range(TOKENS)]


def test_the_gap_grows_with_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    gaps = [np.mean([np.abs(np.asarray(logprobs) - plain[tokens]).mean()
                     for tokens, logprobs in written(*range(20), noise=noise, monkeypatch=monkeypatch)]) for noise in (1e-3, 1e-2, 1e-1)]
    assert gaps[1] / gaps[0] == pytest.approx(10, rel=0.2)
    assert gaps[2] / gaps[1] == pytest.approx(10, rel=0.2)

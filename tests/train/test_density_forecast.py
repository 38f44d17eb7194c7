"""The predicted density against what AdamW really changes, and the alarm where the two part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.observe.board import Board
from asyncrl.train.config import validated
from asyncrl.train.density_forecast import DensityForecast
from asyncrl.train.optim import Optimizer
from asyncrl.train.parallel import Ranks
from asyncrl.train.trainer import Trainer
from asyncrl.weights.density import density_ratio
from tests.observe.rows import SETTINGS, step_row
from tests.train.train_data import random_batch, start

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"), mesh=None)
VOCAB, SETTLED = 64, 24


class Training:
    """A Qwen3 of 100,000 parameters of the usual size, trained by policy gradient with advantages around 0."""

    def __init__(self, **settings: object) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Qwen3ForCausalLM(Qwen3Config(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=16, max_position_embeddings=64, tie_word_embeddings=True))
        config = validated({"trainer": settings}).trainer
        self.optimizer = Optimizer(self.model.named_parameters(remove_duplicate=False), config=config, ranks=ALONE)
        self.forecast = DensityForecast(self.optimizer, beta1=config.betas[0], dtype="bfloat16", ranks=ALONE)
        self._random, self.version = torch.Generator().manual_seed(1), 0

    def update(self) -> None:
        tokens = torch.randint(0, VOCAB, (16, 16), generator=self._random)
        advantages = torch.randn(16, 1, generator=self._random)
        logprobs = torch.log_softmax(self.model(tokens).logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-(advantages * logprobs).mean()).backward()
        self.optimizer.update(version=self.version)
        self.version += 1

    def published(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).bfloat16().view(torch.int16)

    def ratios(self, *, count: int, updates: int = 1) -> list[float]:
        """Observed over predicted density of so many publications in a row."""
        found = []
        for _ in range(count):
            before = self.published()
            self.forecast.published()
            for _ in range(updates):
                self.update()
            predicted = self.forecast.of_delta()
            assert predicted is not None
            assert predicted["elements"] == len(before)
            found.append(density_ratio(float((before != self.published()).double().mean()),
                                       predicted=predicted["changed"] / predicted["elements"]))
        return found

    def settle(self) -> Training:
        for _ in range(SETTLED):
            self.update()
        return self


def warnings(ratio: float) -> list[str]:
    return Board(SETTINGS).add(step_row(weights__density_ratio__last=ratio))


@pytest.mark.parametrize("learning_rate", [1e-6, 3e-6, 1e-5, 3e-5, 1e-4])
def test_the_law_holds_for_adamw_within_25_percent_a_step_and_35_for_four(learning_rate: float) -> None:
    training = Training(learning_rate=learning_rate).settle()
    single, fourfold = training.ratios(count=6), training.ratios(count=3, updates=4)
    assert all(0.75 <= ratio <= 1.25 for ratio in single), single
    assert all(0.65 <= ratio <= 1.35 for ratio in fourfold), fourfold
    assert [warning for ratio in single + fourfold for warning in warnings(ratio)] == []


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.95])
def test_with_another_decay_of_the_first_moment_the_law_holds_within_a_factor_of_2(beta1: float) -> None:
    training = Training(learning_rate=1e-5, betas=(beta1, 0.95))
    for _ in range(40):
        training.update()
    assert all(0.5 <= ratio <= 2 for ratio in training.ratios(count=3))


def test_groups_and_the_schedule_are_in_the_prediction() -> None:
    training = Training(learning_rate=1e-5, learning_rate_groups=[{"match": "mlp", "factor": 8.0}],
                        schedule={"kind": "linear", "total_steps": 60, "final_frac": 0.05}).settle()
    first = training.ratios(count=4)
    for _ in range(28):
        training.update()
    assert all(0.75 <= ratio <= 1.25 for ratio in first + training.ratios(count=4))


def test_until_the_moments_have_settled_nothing_is_predicted() -> None:
    training = Training(learning_rate=1e-5)
    for _ in range(20):
        training.forecast.published()
        training.update()
        assert training.forecast.of_delta() is None
    training.forecast.published()
    training.update()
    assert training.forecast.of_delta() is not None


def test_without_an_update_no_change_is_predicted() -> None:
    training = Training(learning_rate=1e-5).settle()
    training.forecast.published()
    predicted = training.forecast.of_delta()
    assert predicted is not None
    assert predicted["changed"] == 0


def load_moments_of_smaller_gradients(training: Training) -> None:
    for name, moment in training.optimizer.moments().items():
        if name.startswith("exp_avg_sq/"):
            moment.zero_()
        else:
            moment.mul_(100)


def replace_weights(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1.01)


def multiply_rate(training: Training) -> None:
    usual = training.optimizer._step
    training.optimizer._step = lambda share, *, learning_rate: usual(share, learning_rate=30 * learning_rate)  # type: ignore[method-assign]


@pytest.mark.parametrize("mishap", [replace_weights, multiply_rate, load_moments_of_smaller_gradients])
def test_far_more_changes_than_predicted_raise_the_alarm_with_the_likely_causes(mishap: Callable[[Training], None]) -> None:
    training = Training(learning_rate=1e-6).settle()
    training.forecast.published()
    before = training.published()
    mishap(training)
    training.update()
    predicted = training.forecast.of_delta()
    assert predicted is not None
    ratio = density_ratio(float((before != training.published()).double().mean()), predicted=predicted["changed"] / predicted["elements"])
    [warning] = warnings(ratio)
    assert "changes is" in warning
    for cause in ("learning rate higher", "optimizer state", "weights replaced", "wrong base or dtype"):
        assert cause in warning


def lie_on_the_grid(training: Training) -> None:
    """All weights exactly 1, as published: hundreds of steps are needed before the first passes the middle."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(1.0)


def freeze_all_but_norms(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)


def divide_rate(training: Training) -> None:
    usual = training.optimizer._step
    training.optimizer._step = lambda share, *, learning_rate: usual(share, learning_rate=learning_rate / 10)  # type: ignore[method-assign]


@pytest.mark.parametrize("mishap", [lie_on_the_grid, freeze_all_but_norms, divide_rate])
def test_far_fewer_changes_than_predicted_raise_the_alarm_with_the_likely_causes(mishap: Callable[[Training], None]) -> None:
    training = Training(learning_rate=1e-5).settle()
    mishap(training)
    [warning] = warnings(training.ratios(count=1)[0])
    for cause in ("exactly on the published grid", "without a gradient", "trainer.eps", "learning rate lower"):
        assert cause in warning


@pytest.mark.slow
def test_two_ranks_predict_together_what_one_does(tiny: Path, tmp_path: Path) -> None:
    """Through publication, commit and the trainer; β₁ = 0 settles after two updates."""
    def densities(processes: int) -> list[tuple[float | None, float]]:
        async def main() -> list[tuple[float | None, float]]:
            trainer = Trainer(tiny, correction="token_tis", learning_rate=3e-5, processes=processes, betas=(0.0, 0.95))
            await start(trainer, tmp_path / f"run-{processes}")
            try:
                found = [(trainer.predicted_density, (await trainer.publish()).density)]
                for version in range(4):
                    await trainer.step(random_batch(version, version=version))
                    manifest = await trainer.publish()
                    found.append((trainer.predicted_density, manifest.density))
                return found
            finally:
                await trainer.close()
        return asyncio.run(main())

    one, two = densities(0), densities(2)
    assert [predicted is None for predicted, _ in one] == [True, True, True, False, False]
    for (alone, observed), (together, _) in zip(one[3:], two[3:], strict=True):
        assert together == pytest.approx(alone, rel=1e-3)
        assert 1 / 3 < density_ratio(observed, predicted=alone) < 3

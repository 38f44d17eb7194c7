"""A setting misspelt in a script is answered as the same one in a file: its place, its neighbour, what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import ConfigError
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("settings", "field", "told"), [
    ({"learnig_rate": 1e-3}, "trainer.learnig_rate", "Did you mean 'learning_rate'?"),
    ({}, "trainer.learning_rate", "'nothing' is not allowed: Field required. Set it.$"),
    ({"betas": (0.9, 0.95)}, "trainer.learning_rate", "Set it.$"),
    ({"learning_rate": 0, "processes": -1}, "trainer.learning_rate", "Change it. Settings to mend beside it: 1.$"),
    ({"learning_rate": 1e-3, "loss": 3}, "loss", "a section: its settings by name"),
    ({"learning_rate": 1e-3, "loss": lambda ratio: ratio}, "loss.kind", r"one of \['decoupled_ppo', 'ppo', "),
    ({"learning_rate": 1e-3, "loss": "pppo"}, "loss.kind", "Did you mean 'ppo'?"),
    ({"learning_rate": 1e-3, "loss": {"kind": "ppo", "clip_hgh": 1}}, "loss.clip_hgh", "Did you mean 'clip_high'?"),
    ({"learning_rate": 1e-3, "advantages": print}, "advantages.kind", r"one of \['grpo', 'dr_grpo', 'rloo', 'maxrl', 'opo'"),
    ({"learning_rate": 1e-3, "schedule": {"kind": "linear", "total_step": 3}}, "trainer.schedule.total_step", "mean 'total_steps'")])
def test_a_wrong_setting_of_the_trainer_is_named_where_it_was_written(model: Path, settings: dict[str, object], field: str,
                                                                      told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        asyncrl.Trainer(model, **settings)
    assert caught.value.field == field


@pytest.mark.parametrize(("settings", "field", "told"), [
    ({"group_sizes": 3}, "buffer.group_sizes", "Did you mean 'group_size'?"),
    ({"policy": "sof"}, "buffer.policy.kind", "Did you mean 'soft'?"),
    ({"policy": {"kind": "fixed_lag", "lag_step": 1}}, "buffer.policy.lag_step", "Did you mean 'lag_steps'?"),
    ({"max_staleness": -1}, "buffer.max_staleness", "greater than or equal to 0")])
def test_a_wrong_setting_of_the_buffer_is_named_where_it_was_written(settings: dict[str, object], field: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        asyncrl.ReplayBuffer(**({"groups_per_step": 1, "group_size": 2, "max_staleness": 1} | settings))
    assert caught.value.field == field


def test_a_kind_alone_is_a_section() -> None:
    buffer = asyncrl.ReplayBuffer(groups_per_step=1, group_size=2, max_staleness=1, policy="soft")
    assert buffer.config.policy.kind == "soft"


def test_every_public_name_is_there() -> None:
    assert asyncrl.__all__ == sorted(asyncrl.__all__)
    assert dir(asyncrl) == asyncrl.__all__
    assert all(getattr(asyncrl, name).__name__ == name for name in asyncrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Runn'"):
        asyncrl.Runn  # noqa: B018

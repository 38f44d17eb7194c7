"""Pairs of settings that cannot work together name both, and what is not offered says so."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.train.config import validated


def config_of(**settings: object) -> object:
    return validated({"trainer": {"learning_rate": 1e-3, **settings}, "correction": "none"}).trainer


@pytest.mark.parametrize(("settings", "field", "said"), [
    ({"tensor_parallel": 2}, "trainer.tensor_parallel", "not offered yet. FSDP2 shards"),
    ({"context_parallel": 2}, "trainer.context_parallel", "not offered yet. A sequence stays on one rank"),
    ({"compile": True, "activation_checkpointing": "selective"}, "trainer.compile, trainer.activation_checkpointing",
     "none or full"),
    ({"processes": 0, "sharding": {"prefetch_layers": 3}}, "trainer.sharding, trainer.processes", "nothing reads it"),
    ({"attention": "eager"}, "trainer.attention", "'sdpa'"),
    ({"sharding": {"reduce_dtype": "float16"}}, "trainer.sharding.reduce_dtype", "")])
def test_what_cannot_be_is_refused_by_name(settings: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(**settings)
    assert refused.value.field == field
    assert said in str(refused.value)


@pytest.mark.parametrize("settings", [
    {"compile": True, "activation_checkpointing": "full"}, {"processes": 0, "compile": True, "activation_checkpointing": "none"},
    {"processes": 0, "activation_checkpointing": "selective", "attention": "sdpa"}, {"processes": 4, "sharding": {"prefetch_layers": 0}}])
def test_what_can_be_together_is_taken(settings: dict[str, object]) -> None:
    built = config_of(**settings)
    assert {name: getattr(built, name) for name in settings if name != "sharding"} == {
        name: value for name, value in settings.items() if name != "sharding"}

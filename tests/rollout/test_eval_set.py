"""Held-out sets: refused by name when they ask for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.data_config import DataSettings
from asyncrl.rollout.data_set import DataSet
from asyncrl.rollout.eval_set import EvalSet, check_sets
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Sampling
from tests.rollout.rollout_fakes import write_tokenizer

PROMPTS = (Prompt(text="1+1="),)


@pytest.mark.parametrize(("settings", "field"), [
    ({"name": "a.b"}, "eval.sets"), ({"name": ""}, "eval.sets"), ({"prompts": ()}, "eval.sets.sums.prompts"),
    ({"samples_per_prompt": 0}, "eval.sets.sums.samples_per_prompt"),
    ({"pass_at": (1, 5), "samples_per_prompt": 4}, "eval.sets.sums.pass_at, eval.sets.sums.samples_per_prompt"),
    ({"pass_at": (0,)}, "eval.sets.sums.pass_at, eval.sets.sums.samples_per_prompt")])
def test_a_set_that_cannot_be_measured_is_refused_by_name(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EvalSet(**{"name": "sums", "prompts": PROMPTS} | settings)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(("sampling", "field"), [
    (Sampling(temperature=0.0), "temperature"), (Sampling(top_p=0.9), "top_p"), (Sampling(stop=("=",)), "stop")])
def test_sampling_that_an_engine_does_not_have_is_refused_at_the_start_naming_the_set(sampling: Sampling, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sets([EvalSet("plain", PROMPTS), EvalSet("hard", PROMPTS, sampling=sampling)], engines=[FakeEngine()])
    assert refused.value.field == f"eval.sets.hard.sampling.{field}"


def test_two_sets_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="sets with names of their own"):
        check_sets([EvalSet("sums", PROMPTS), EvalSet("sums", PROMPTS)], engines=[])


def test_no_source_of_training_prompts_can_be_taken_for_a_set_with_an_environment_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^prompts\.source = 'eval/sums'"):
        DataSet([Prompt(text="1+1=", source="eval/sums")], settings=DataSettings(), seed=0).next()
    with pytest.raises(ConfigError, match=r"^prompts\.sources = 'eval/sums'"):
        Mixture({"eval/sums": PromptSource([Prompt(text="1+1=")])})


def test_a_prompt_of_a_set_that_cannot_be_made_whole_names_the_set(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(ConfigError, match=r"^eval\.sets\.sums\.prompts = ''"):
        EvalSet("sums", (*PROMPTS, Prompt(text=""))).completed(tokenizer)

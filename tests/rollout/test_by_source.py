"""Each source of prompts may have its own environment, rewards and sampling; what does not fit is refused at the start."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from asyncrl.accounting import Ledger
from asyncrl.errors import ConfigError
from asyncrl.rollout.by_source import BySource, check_sampling, check_sources, joined, sampling_of
from asyncrl.rollout.engine import Engine, Interruption
from asyncrl.rollout.env import Env, SingleTurn
from asyncrl.rollout.fake_engine import FakeEngine
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout, Sampling, Status
from tests.rollout.rollout_fakes import FunctionEnv, one_turn, router_of, write_tokenizer

HOT, COLD = Sampling(temperature=1.3, max_new_tokens=3), Sampling(temperature=0.5, max_new_tokens=2)
REWARDED = SingleTurn({"f": lambda prompt, completion: 1.0})


def rolled_out(env: Env, sources: list[str], folder: Path, *, sampling: object = HOT) -> list[Rollout]:
    """One rollout of a prompt of each source, at once."""
    async def main() -> list[Rollout]:
        env.start(folder, Tokenizer(write_tokenizer(folder / "tokenizer")))
        try:
            worker = RolloutWorker(await router_of(FakeEngine(token_s=0.0)), env, sampling=sampling, ledger=Ledger(), seed=0)  # type: ignore[arg-type]
            prompts = [Prompt(text="0", tokens=(3,), source=source, prompt_id=source) for source in sources]
            return await asyncio.gather(*(worker.run(prompt, group_id=0, index=index) for index, prompt in enumerate(prompts)))
        finally:
            await env.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


def parent(prompt: Prompt, completion: str) -> float:
    """Which process forked this worker."""
    return float(os.getppid())


def slow(prompt: Prompt, completion: str) -> float:
    time.sleep(0.6)
    return 1.0


def test_each_source_has_its_own_rewards_in_workers_of_one_zygote(tmp_path):
    env = BySource({"a": SingleTurn({"first": parent, "one": lambda prompt, completion: 1.0}),
                    "b": SingleTurn({"second": parent}, workers=2)})
    a, b, again = rolled_out(env, ["a", "b", "a"], tmp_path)
    assert (set(a.rewards), set(b.rewards)) == ({"first", "one"}, {"second"})
    assert a.rewards["first"] == b.rewards["second"] == again.rewards["first"] != os.getpid()


def test_each_source_has_its_own_deadline(tmp_path):
    env = BySource({"strict": SingleTurn({"f": slow}, timeout_s=0.1), "patient": SingleTurn({"f": slow}, timeout_s=20.0)})
    strict, patient = rolled_out(env, ["strict", "patient"], tmp_path)
    assert (strict.status, patient.rewards) == (Status.REWARD_TIMEOUT, {"f": 1.0})


def test_an_environment_of_several_sources_is_started_once_and_others_beside_it(tmp_path):
    started = []

    class Counted(SingleTurn):
        def start(self, logs: Path, tokenizer: Tokenizer) -> None:
            started.append(self)
            super().start(logs, tokenizer)

    shared = Counted({"f": lambda prompt, completion: 2.0})
    env = BySource({"a": shared, "b": shared, "c": FunctionEnv(one_turn), "d": SingleTurn({"g": lambda prompt, completion: 3.0})})
    rewards = [rollout.rewards for rollout in rolled_out(env, ["a", "b", "c", "d"], tmp_path)]
    assert rewards == [{"f": 2.0}, {"f": 2.0}, {"total": 1.0}, {"g": 3.0}]
    assert started == [shared]


@pytest.mark.parametrize("is_mapping", [False, True])
def test_a_source_with_an_environment_of_its_own_takes_none_from_the_others(is_mapping, tmp_path):
    given = SingleTurn({"f": lambda prompt, completion: 2.0})
    env = joined({"a": given} if is_mapping else given, own={"mine": SingleTurn({"g": lambda prompt, completion: 3.0})})
    assert [rollout.rewards for rollout in rolled_out(env, ["a", "mine", "a"], tmp_path)] == [{"f": 2.0}, {"g": 3.0}, {"f": 2.0}]


def test_an_environment_alone_stays_itself():
    env = FunctionEnv(one_turn)
    assert joined(env, own={}) is env


def test_each_source_is_sampled_its_own_way_and_the_rollout_says_how(tmp_path):
    hot, cold = rolled_out(FunctionEnv(one_turn), ["hot", "cold"], tmp_path, sampling={"hot": HOT, "cold": COLD})
    assert (hot.sampling, cold.sampling) == (HOT, COLD)
    assert (hot.num_tokens, cold.num_tokens) == (3, 2)


@pytest.mark.parametrize(("env", "sampling"), [(BySource({"a": FunctionEnv(one_turn)}), HOT), (FunctionEnv(one_turn), {"a": HOT})])
def test_a_prompt_of_a_source_that_was_given_nothing_ends_the_run(env, sampling, tmp_path):
    with pytest.raises(ConfigError, match="'b' as its source"):
        rolled_out(env, ["b"], tmp_path, sampling=sampling)


@pytest.mark.parametrize(("mapping", "message"), [
    ({"sums": 1}, r"Add \['proofs'\]"), ({"sums": 1, "proofs": 1, "sumps": 1}, "Did you mean 'sums'"),
    ({"sums": 1, "proof": 1}, "Did you mean 'proofs'"), ({}, "an entry for each source"),
    ({"sums": 1, "proofs": 1, "x": 1}, r"\. Remove \['x'\]\.$"), ({"sums": 1, "x": 1}, r"\. Add \['proofs'\]\. Remove \['x'\]\.$"),
    ({"sums": 1}, r"\. Add \['proofs'\]\.$")])
def test_sources_that_are_missing_or_unknown_are_refused_at_the_start(mapping, message):
    envs, samplings = {name: REWARDED for name in mapping}, {name: HOT for name in mapping}
    with pytest.raises(ConfigError, match=rf"env = .*{message}"):
        check_sources(["sums", "proofs"], field="env", given=envs, others=[])
    with pytest.raises(ConfigError, match=rf"sampling = .*{message}"):
        check_sources(["sums", "proofs"], field="sampling", given=samplings, others=[])


def test_held_out_prompts_need_an_entry_too_and_prompts_that_name_their_own_source_may_name_any():
    envs = {"sums": REWARDED, "proofs": REWARDED}
    check_sources(["sums"], field="env", given=envs, others=["proofs"])
    check_sources([], field="sampling", given={"anything": HOT}, others=[])
    with pytest.raises(ConfigError, match=r"env = .*Add \['held_out'\]"):
        check_sources([], field="env", given=envs, others=["held_out"])


def engine(**capabilities: object) -> Engine:
    found = FakeEngine()
    found.capabilities = found.capabilities.__class__(**{name: getattr(found.capabilities, name) for name in
                                                         found.capabilities.__slots__} | capabilities)
    return found


@pytest.mark.parametrize(("sampling", "message"), [
    (Sampling(top_p=0.9), r"sampling\.top_p"), ({"a": HOT, "b": Sampling(top_p=0.9)}, r"sampling\.b\.top_p"),
    ({"a": HOT, "b": Sampling(temperature=0.0)}, r"sampling\.b\.temperature"), ({"a": Sampling(stop=("x",))}, r"sampling\.a\.stop"),
    ({"a": Sampling(temperature=1e-4)}, r"sampling\.a\.temperature")])
def test_what_cannot_be_trained_on_or_sampled_is_refused_by_its_source(sampling, message):
    with pytest.raises(ConfigError, match=message):
        check_sampling(sampling, engines=[engine(lowest_temperature=1e-3)], interruption=Interruption.KEEP)


def test_an_engine_with_one_temperature_for_all_takes_only_that():
    one = engine(per_request_temperature=False)
    check_sampling({"a": HOT, "b": HOT}, engines=[one], interruption=Interruption.KEEP)
    with pytest.raises(ConfigError, match="one for all sources"):
        check_sampling({"a": HOT, "b": COLD}, engines=[one], interruption=Interruption.KEEP)
    check_sampling({"a": HOT, "b": COLD}, engines=[engine()], interruption=Interruption.KEEP)
    assert sampling_of(HOT, "anything") is HOT

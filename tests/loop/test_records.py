"""Records round the loop: with kept sets and routed experts the trainer's ratios are 1 where weights are equal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.errors import ConfigError
from asyncrl.loop import Run
from asyncrl.rollout.env import Outcome, Session
from asyncrl.rollout.inline_engine import InlineEngine
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.task_config import ProbeConfig
from asyncrl.rollout.transformers_engine import TransformersEngine
from asyncrl.run_options import RunOptions
from asyncrl.tokenizer import Tokenizer
from asyncrl.train.trainer import Trainer
from asyncrl.types import Prompt, Sampling
from asyncrl.weights.config import WeightsConfig
from tests.rollout.rollout_fakes import FakeEngine
from tests.tiny_model import make_tiny_model
from tests.tiny_moe import make_tiny_moe

TRUNCATED = Sampling(temperature=1.2, top_p=0.8, top_k=6, max_new_tokens=5)
SAMPLINGS = {"truncated": TRUNCATED, "whole": Sampling(temperature=0.9, max_new_tokens=5)}


class TwoTurns:
    """Every second prompt gets an answer between two turns."""

    def start(self, logs: Path, tokenizer: Tokenizer) -> None:
        """Nothing to start."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Two completions with a token of the environment between them."""
        turn = await session.generate(prompt.tokens)
        if not turn.finish.is_error and len(prompt.tokens) % 2:
            turn = await session.generate([*prompt.tokens, *turn.tokens.tolist(), 5])
        return Outcome(turn.finish, {"length": float(turn.tokens.sum() % 7)})

    async def close(self) -> None:
        """Nothing to end."""


def prompts() -> list[Prompt]:
    return [Prompt(text=f"{a}+{b}=" + "3" * (a % 2), source=("truncated", "whole")[b % 2]) for a in range(5) for b in range(4)]


def run_of(model: Path, folder: Path, engine: Any, *, trainer: dict[str, Any] | None = None, **buffer: Any) -> Run:
    return Run(prompts=PromptSource(prompts()), engine=engine, env=TwoTurns(), sampling=SAMPLINGS,
               buffer=ReplayBuffer(groups_per_step=3, group_size=4, zero_variance="keep", **buffer),
               trainer=Trainer(model, correction="token_tis", learning_rate=3e-3, processes=0, epochs=2, **trainer or {}),
               options=RunOptions(name="run", folder=folder, seed=1, weights=WeightsConfig(dtype="float32", interruption="recompute"),
                                  probe=ProbeConfig(every_steps=1, prompts=6, max_mean_gap=1e-4)))


@pytest.mark.parametrize(("engine", "max_staleness"), [(InlineEngine, 0), (InlineEngine, 2), (TransformersEngine, 2)])
def test_a_run_of_truncated_and_whole_rollouts_is_on_policy_where_its_version_is(tmp_path: Path, engine: Any, max_staleness: int) -> None:
    """The probe of every step compares engine and trainer over the recorded sets; so do fresh tokens of every batch."""
    model = make_tiny_model(tmp_path / "model")

    async def main() -> None:
        async with run_of(model, tmp_path, engine(model), max_staleness=max_staleness) as run:
            gaps = []
            async for report in run.steps(4):
                gaps += [value for name, value in report.metrics.items() if name == "correction/logprob_gap_staleness_0/max"]
                for rollout in report.batch.rollouts:
                    for sequence in rollout.sequences:
                        sampled = sequence.policy_versions >= 0
                        if rollout.source == "truncated":
                            assert (sequence.records.kept.counts[sampled] <= 6).all()
                            assert sequence.records.kept.counts[sampled].any()
                            assert not sequence.records.kept.counts[~sampled].any()
                        else:
                            assert sequence.records.kept is None
            assert 0 <= max(gaps) < 1e-4
            stale = {version for version, tokens in run.buffer.staleness_tokens.items() if tokens}
            assert (max(stale) > 0) == (max_staleness > 0)

    asyncio.run(main())


@pytest.mark.parametrize("engine", [InlineEngine, TransformersEngine])
def test_experts_are_recorded_of_every_input_and_replayed(tmp_path: Path, engine: Any) -> None:
    """Prompts, both turns, and the environment's tokens between them, over interruptions; beside kept sets, where there are any."""
    model = make_tiny_moe(tmp_path / "model")

    async def main() -> None:
        async with run_of(model, tmp_path, engine(model), max_staleness=2, trainer={"routing_replay": True}) as run:
            async for report in run.steps(4):
                assert report["train/routing_replayed/frac"] == 1.0
                assert 0.0 <= report["train/routing_flips/frac"] < 0.5
                for rollout in report.batch.rollouts:
                    for sequence in rollout.sequences:
                        assert (sequence.records.experts[:-1] >= 0).all()
                        assert (sequence.records.experts[-1] < 0).all()
                        assert (sequence.records.kept is None) == (rollout.source == "whole")

    asyncio.run(main())


def test_experts_that_no_engine_records_are_not_replayed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        Run(prompts=PromptSource(prompts()), engine=FakeEngine(), env=TwoTurns(), sampling=Sampling(max_new_tokens=4),
            buffer=ReplayBuffer(groups_per_step=3, group_size=4, max_staleness=0),
            trainer=Trainer(model, learning_rate=3e-3, processes=0, routing_replay=True))
    assert error.value.field == "trainer.routing_replay, engine.kind"


def test_an_engine_that_records_nothing_is_refused_at_the_start_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine = FakeEngine()
    engine.capabilities = engine.capabilities.__class__(**{name: getattr(engine.capabilities, name) for name in
                                                           engine.capabilities.__slots__} | {"truncates": True})
    with pytest.raises(ConfigError) as error:
        run_of(model, tmp_path, engine, max_staleness=0)
    assert error.value.field == "sampling.truncated.top_p, engine.kind"
    assert np.isclose(error.value.value[0], 0.8)


def test_an_engine_that_forgets_its_record_fails_the_rollout_and_not_the_ratio() -> None:
    """In `Session`: a chunk of a truncated request without its sets is an error of the engine."""
    from asyncrl.accounting import Ledger
    from asyncrl.errors import EngineError
    from asyncrl.records import Wanted
    from tests.rollout.rollout_fakes import KEY, router_of

    async def main() -> None:
        session = Session(await router_of(FakeEngine(token_s=0.0)), key=KEY, seed=0, sampling=TRUNCATED, ledger=Ledger(),
                          wanted=Wanted(kept_sets=True))
        with pytest.raises(EngineError, match="recorded nothing of its tokens"):
            await session.generate([1, 2])

    asyncio.run(main())

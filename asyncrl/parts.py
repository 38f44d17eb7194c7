"""Whether the parts of a run fit one another: asked when it is made, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.buffer.config import BufferConfig
from asyncrl.pairs import check_colocation, check_deterministic, check_pairs, check_push, check_routing_replay
from asyncrl.rollout.by_source import Samplings, check_sampling, check_sources
from asyncrl.rollout.engine import Engine, Interruption, require_adapters
from asyncrl.rollout.env import Env
from asyncrl.rollout.eval_set import check_sets, sources_of
from asyncrl.rollout.prompts import PromptSource
from asyncrl.run_options import RunOptions
from asyncrl.train.config import TrainConfig


def check_parts(options: RunOptions, *, prompts: PromptSource, engines: tuple[Engine, ...], env: Env | Mapping[str, Env],
                sampling: Samplings, buffer: BufferConfig, training: TrainConfig) -> None:
    """Raise ConfigError for settings that contradict one another, and for what an engine cannot do."""
    check_pairs(buffer=buffer, training=training, weights=options.weights)
    check_sources(prompts.names, field="env", given=env, others=sources_of(asked for asked in options.eval_sets if asked.env is None))
    check_sources(prompts.names, field="sampling", given=sampling,
                  others=sources_of(asked for asked in options.eval_sets if asked.sampling is None))
    check_sampling(sampling, engines=engines, interruption=Interruption(options.weights.interruption))
    for engine in engines:
        require_adapters(engine.capabilities, training.lora, engine=engine.name)
    check_sets(options.eval_sets, engines=engines)
    capabilities = {engine.name: engine.capabilities for engine in engines}
    check_routing_replay(training, engines=capabilities)
    check_colocation(options.colocation, buffer=buffer, weights=options.weights, engines=capabilities)
    check_push(options.weights, engines=capabilities, processes=training.trainer.processes, colocation=options.colocation)
    if options.deterministic:
        check_deterministic(buffer, engines=capabilities, goes_by_rewards=prompts.goes_by_rewards)

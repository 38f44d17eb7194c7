"""Settings that are fine alone and wrong together, refused before anything starts. Each refusal names both. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.buffer.config import BufferConfig, check_publish_interval, may_be_stale
from asyncrl.colocation_config import NoColocation, TurnsColocation
from asyncrl.errors import ConfigError
from asyncrl.lora_config import NO_LORA, LoRAConfig, adapters_of
from asyncrl.rollout.config import EngineConfig
from asyncrl.rollout.engine import Capabilities, Interruption, require, require_adapters, require_sleep
from asyncrl.rollout.eval_set import check_set_sampling
from asyncrl.rollout.task_config import MixturePrompts, PromptsConfig, SetsEval, SingleTurnConfig
from asyncrl.train.advantages_config import GAE, AdvantagesConfig, SoftOverlong
from asyncrl.train.config import TrainConfig
from asyncrl.types import Sampling
from asyncrl.weights.config import NcclConfig, WeightsConfig


def check_pairs(*, buffer: BufferConfig, training: TrainConfig, weights: WeightsConfig) -> None:
    """Raise ConfigError unless batch, algorithm and weight sync go together."""
    _correction_of_stale_data_is_chosen(buffer, training)
    _fixed_lag_drains(buffer, weights)
    _a_group_has_a_baseline(buffer, training)
    _minibatches_are_equal(buffer, training)
    _every_rank_has_work(buffer, training)
    check_publish_interval(buffer, weights.publish_every_steps)


def check_engine(engine: EngineConfig, *, sampling: Sampling, weights: WeightsConfig, lora: LoRAConfig = NO_LORA) -> None:
    """Raise ConfigError when the run needs what this kind of engine lacks, whatever the model."""
    _the_context_holds_a_prompt_too(engine, sampling)
    if weights.dtype == "float32" and engine.dtype == "bfloat16":
        raise ConfigError("weights.dtype, engine.dtype", value=(weights.dtype, engine.dtype),
                          allowed="published values that the engine can hold exactly: bfloat16 in either, float32 in float32",
                          remedy="Set weights.dtype=bfloat16, or engine.dtype=float32.")
    capabilities = engine.capabilities(context_tokens=engine.most_context_tokens or 0).serving(adapters_of(lora))
    require_adapters(capabilities, lora, engine=engine.kind)
    require(capabilities, sampling, Interruption(weights.interruption), engine=engine.kind)


def check_routing_replay(training: TrainConfig, *, engines: Mapping[str, Capabilities]) -> None:
    """Raise ConfigError when experts are to be replayed that an engine does not record."""
    if not training.trainer.routing_replay:
        return
    for engine, capabilities in engines.items():
        if not capabilities.routed_experts:
            raise ConfigError("trainer.routing_replay, engine.kind", value=(True, engine), allowed="engines that record routed experts",
                              remedy="Take the engine transformers or inline, or leave trainer.routing_replay out.")


def check_evaluation(evaluation: SetsEval, *, env: SingleTurnConfig, sampling: Sampling, engine: EngineConfig, buffer: BufferConfig,
                     weights: WeightsConfig) -> None:
    """Raise ConfigError when evaluations fall between published versions, a set needs what this kind of engine lacks, or its rewards
    may take longer than the run waits."""
    if evaluation.every_steps % weights.publish_every_steps:
        raise ConfigError("eval.every_steps, weights.publish_every_steps", value=(evaluation.every_steps, weights.publish_every_steps),
                          allowed="evaluations of versions that are published",
                          remedy="Make eval.every_steps a multiple of weights.publish_every_steps.")
    capabilities = engine.capabilities(context_tokens=engine.most_context_tokens or 0)
    for name, asked in evaluation.sets.items():
        check_deadline(asked.env.over(env), buffer=buffer, field=f"eval.sets.{name}.env")
        check_set_sampling(name, asked.sampling.over(sampling), capabilities=capabilities, engine=engine.kind)
        try:
            _the_context_holds_a_prompt_too(engine, asked.sampling.over(sampling))
        except ConfigError as error:
            raise error.moved("sampling", f"eval.sets.{name}.sampling") from error


def check_deadline(env: SingleTurnConfig, *, buffer: BufferConfig, field: str = "env") -> None:
    """Raise ConfigError for a judgement, a call of each reward function, that may take longer than the buffer waits."""
    calls = len(env.reward) if isinstance(env.reward, dict) else 1
    if calls * env.timeout_s >= buffer.stall_timeout_s:
        raise ConfigError(f"{field}.timeout_s, buffer.stall_timeout_s", value=(env.timeout_s, buffer.stall_timeout_s),
                          allowed="rewards that end, all calls together, before the buffer takes the run for dead",
                          remedy=f"Lower {field}.timeout_s or raise buffer.stall_timeout_s.")


def check_mixture(prompts: MixturePrompts, *, env: SingleTurnConfig, sampling: Sampling, engine: EngineConfig, buffer: BufferConfig,
                  weights: WeightsConfig) -> None:
    """Raise ConfigError for what a source of a mixture sets for itself and other sections do not go together with."""
    for name, source in prompts.sources.items():
        field = f"prompts.sources.{name}"
        check_deadline(source.env.over(env), buffer=buffer, field=f"{field}.env")
        try:
            check_engine(engine, sampling=source.sampling.over(sampling), weights=weights)
        except ConfigError as error:
            raise error.moved("sampling", f"{field}.sampling") from error


def check_overlong(advantages: AdvantagesConfig, *, prompts: PromptsConfig, sampling: Sampling) -> None:
    """Raise ConfigError for a penalty on length that no completion is long enough for."""
    overlong = getattr(advantages, "overlong", None)
    sources = prompts.sources.values() if isinstance(prompts, MixturePrompts) else ()
    longest = max((source.sampling.over(sampling).max_new_tokens for source in sources), default=sampling.max_new_tokens)
    if isinstance(overlong, SoftOverlong) and overlong.max_tokens - overlong.cache_tokens >= longest:
        raise ConfigError("advantages.overlong.max_tokens, advantages.overlong.cache_tokens, sampling.max_new_tokens",
                          value=(overlong.max_tokens, overlong.cache_tokens, longest),
                          allowed="a penalty that begins, at max_tokens − cache_tokens, below the longest completion",
                          remedy="As a rule max_tokens is sampling.max_new_tokens; or remove advantages.overlong.")


def check_critic(advantages: AdvantagesConfig, *, steps: int) -> None:
    """Raise ConfigError for a critic that warms up for all of the run."""
    if isinstance(advantages, GAE) and advantages.critic.warm_up_steps >= steps:
        raise ConfigError("advantages.critic.warm_up_steps, run.steps", value=(advantages.critic.warm_up_steps, steps),
                          allowed="a warm-up shorter than the run", remedy="No step would train the policy: raise run.steps, or lower "
                          "warm_up_steps.")


def check_colocation(colocation: NoColocation | TurnsColocation, *, buffer: BufferConfig, weights: WeightsConfig,
                     engines: Mapping[str, Capabilities]) -> None:
    """Raise ConfigError unless engines and trainer can take turns: no engine writes while the trainer trains, and every one can sleep."""
    if not isinstance(colocation, TurnsColocation):
        return
    if buffer.policy.kind != "fixed_lag" and (buffer.policy.kind, buffer.max_staleness) != ("lease", 0):
        raise ConfigError("colocation.kind, buffer.policy.kind, buffer.max_staleness",
                          value=("turns", buffer.policy.kind, buffer.max_staleness),
                          allowed="fixed_lag, or lease with max_staleness 0, where engines and trainer take turns",
                          remedy="Else engines write while the trainer trains, and would need the memory then; set buffer.max_staleness=0, "
                                 "or colocation.kind=none.")
    if weights.anchor_every_versions is not None:
        raise ConfigError("colocation.kind, weights.anchor_every_versions", value=("turns", weights.anchor_every_versions),
                          allowed="no interval of anchors where engines and trainer take turns",
                          remedy="Leave it out: an engine that slept has nothing that a delta could change; all versions are anchors.")
    for name, capabilities in engines.items():
        require_sleep(capabilities, engine=name)


def check_push(weights: WeightsConfig, *, engines: Mapping[str, Capabilities], processes: int,
               colocation: NoColocation | TurnsColocation) -> None:
    """Raise ConfigError unless trainer ranks and engines can send and receive at the same time, where versions are pushed."""
    transport = weights.transport
    if not isinstance(transport, NcclConfig):
        return
    if processes == 0:
        raise ConfigError("weights.transport.kind, trainer.processes", value=("nccl", 0), allowed="trainer ranks in processes of their own",
                          remedy="Set trainer.processes=1, or weights.transport=store.")
    for name, capabilities in engines.items():
        if not capabilities.own_process:
            raise ConfigError("weights.transport.kind, engine.kind", value=("nccl", name), allowed="engines in processes of their own",
                              remedy="Take the transformers engine or vLLM, or set weights.transport=store.")
    if isinstance(colocation, TurnsColocation):
        raise ConfigError("weights.transport.kind, colocation.kind", value=("nccl", "turns"),
                          allowed="engines that are awake while the trainer sends",
                          remedy="Set weights.transport=store, or colocation.kind=none.")
    if weights.interruption == "drain":
        raise ConfigError("weights.transport.kind, weights.interruption", value=("nccl", "drain"),
                          allowed="keep or recompute where versions are pushed",
                          remedy="Engines end their rollouts at different times, and those that come late are not waited for; set "
                                 "weights.transport=store, or another interruption.")
    if 3 * transport.timeout_s > weights.fetch_timeout_s:
        raise ConfigError("weights.transport.timeout_s, weights.fetch_timeout_s", value=(transport.timeout_s, weights.fetch_timeout_s),
                          allowed="a time-out of the transport that is at most a third of that of a fetch",
                          remedy="Lower timeout_s, or raise fetch_timeout_s: else engines are fenced that only wait for another one.")


def check_deterministic(buffer: BufferConfig, *, engines: Mapping[str, Capabilities], goes_by_rewards: bool) -> None:
    """Raise ConfigError unless nothing that a run decides depends on time.

    That is: which version writes a token, which requests are sampled together, and which prompt is next.
    """
    if buffer.policy.kind != "fixed_lag" and (buffer.policy.kind, buffer.max_staleness) != ("lease", 0):
        raise ConfigError("run.deterministic, buffer.policy.kind, buffer.max_staleness",
                          value=(True, buffer.policy.kind, buffer.max_staleness),
                          allowed="fixed_lag, or lease with max_staleness 0, in a deterministic run",
                          remedy="Else which version writes a token depends on time; choose the policy fixed_lag for stale data.")
    if len(engines) != 1 or not all(engine.bit_reproducible for engine in engines.values()):
        raise ConfigError("run.deterministic, engine.kind", value=(True, *engines),
                          allowed="one engine, and one whose capabilities say bit_reproducible",
                          remedy="Take the engine inline; others sample together whatever happens to wait.")
    if goes_by_rewards:
        raise ConfigError("run.deterministic, prompts.curriculum", value=(True, "pass_rate"),
                          allowed="no curriculum in a deterministic run",
                          remedy="Which rewards have come in when the next prompt is drawn depends on time; remove the curriculum.")


def _the_context_holds_a_prompt_too(engine: EngineConfig, sampling: Sampling) -> None:
    most_tokens = engine.most_context_tokens
    if most_tokens is not None and sampling.max_new_tokens >= most_tokens:
        raise ConfigError("sampling.max_new_tokens, engine.context_tokens", value=(sampling.max_new_tokens, most_tokens),
                          allowed="fewer tokens to write than the context holds, prompt included",
                          remedy="Lower max_new_tokens, or raise the engine's context.")


def _correction_of_stale_data_is_chosen(buffer: BufferConfig, training: TrainConfig) -> None:
    if may_be_stale(buffer) and training.correction is None:
        raise ConfigError("correction, buffer.max_staleness", value=f"unset with max_staleness {buffer.max_staleness}",
                          allowed="a chosen correction whenever data can be stale",
                          remedy="Set correction: {kind: token_tis}, or choose {kind: none} knowing that the gradient is biased.")


def _fixed_lag_drains(buffer: BufferConfig, weights: WeightsConfig) -> None:
    if buffer.policy.kind == "fixed_lag" and weights.interruption != "drain":
        raise ConfigError("weights.interruption, buffer.policy.kind", value=(weights.interruption, "fixed_lag"),
                          allowed="drain with fixed_lag",
                          remedy="An update inside a rollout would mix lags; set weights.interruption=drain.")


def _a_group_has_a_baseline(buffer: BufferConfig, training: TrainConfig) -> None:
    if buffer.group_size == 1 and training.advantages.kind not in ("reinforce_plus_plus", "gae"):
        raise ConfigError("buffer.group_size, advantages.kind", value=(1, training.advantages.kind),
                          allowed=f"at least 2 rollouts a group with {training.advantages.kind}, which compares them",
                          remedy="A rollout alone has advantage 0 and nothing is learnt; raise group_size, or take "
                                 "reinforce_plus_plus, which compares with the whole batch, or gae, with a critic.")


def _minibatches_are_equal(buffer: BufferConfig, training: TrainConfig) -> None:
    groups, minibatches = buffer.groups_per_step, training.trainer.minibatches_per_step
    if groups % minibatches:
        raise ConfigError("trainer.minibatches_per_step, buffer.groups_per_step", value=(minibatches, groups),
                          allowed="a number of minibatches that divides the groups of a batch",
                          remedy="A minibatch holds whole groups and is one update: in a smaller one each group would weigh more.")


def _every_rank_has_work(buffer: BufferConfig, training: TrainConfig) -> None:
    ranks, rollouts = training.trainer.processes, buffer.groups_per_step * buffer.group_size // training.trainer.minibatches_per_step
    if ranks > rollouts:
        raise ConfigError("trainer.processes, trainer.minibatches_per_step, buffer.groups_per_step, buffer.group_size",
                          value=(ranks, training.trainer.minibatches_per_step, buffer.groups_per_step, buffer.group_size),
                          allowed=f"at most as many ranks as an update has rollouts, which is {rollouts}",
                          remedy="A sequence is never split over ranks: one would have nothing to do. Use fewer, or a larger batch.")

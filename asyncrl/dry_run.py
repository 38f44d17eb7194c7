"""What a run would do, told before it starts: its resolved configuration, and what follows from it. Starts and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from asyncrl.buffer.config import make_depth, make_policy
from asyncrl.buffer.policies import Drop, FixedLag, Lease, TokenMask
from asyncrl.config import RunConfig, dump_config
from asyncrl.correction.formula import kept_text, weight_text
from asyncrl.rollout.task_config import SetsEval
from asyncrl.task import build_eval_sets, most_new_tokens
from asyncrl.train.advantages_config import GAE
from asyncrl.train.reference_config import InLoss, NoReference
from asyncrl.training import processes_of

_MOST_SHOWN = 6


def describe(config: RunConfig) -> str:
    """YAML that `asyncrl train` takes back, with the processes and the derived quantities as comments after it."""
    parts = {"processes": processes_of(config), "what follows": [*_a_step(config), *_the_whole(config)]}
    comments = [f"# {line}" for title, rows in parts.items() for line in ("", f"{title}:", *(f"  {row}" for row in rows))]
    return "\n".join([dump_config(config).rstrip(), *(line.rstrip() for line in comments)])


def _a_step(config: RunConfig) -> list[str]:
    groups, size, trainer = config.buffer.groups_per_step, config.buffer.group_size, config.trainer
    rollouts = groups * size
    return [
        f"batch: {groups} groups of {size}, {rollouts:,} rollouts, at most {rollouts * most_new_tokens(config):,} sampled tokens",
        f"updates: {_plural(trainer.updates_per_step, 'update')} a step, {groups // trainer.minibatches_per_step} groups each "
        f"(minibatches {trainer.minibatches_per_step} × epochs {trainer.epochs})",
        *_corrected(config), *_beside_the_policy(config), *_staleness(config)]


def _corrected(config: RunConfig) -> list[str]:
    training = config.training
    correction = training.build_correction()
    if training.has_proximal_pass:
        proximal = "of a forward over the batch, before its first update"
    elif correction.proximal == "log_linear":
        proximal = "guessed between rollout and current ones, without a forward of their own"
    else:
        proximal = "those of the forward that trains, without one of their own"
    kept = " and divided by" if correction.denominator == "kept" else ""
    return [f"correction: weight {weight_text(correction)} with r = proximal / rollout; kept{kept}: {kept_text(correction)}",
            f"proximal logprobs: {proximal}"]


def _beside_the_policy(config: RunConfig) -> list[str]:
    """The models that a trainer holds beside the one it trains."""
    rows, reference = [], config.reference
    if not isinstance(reference, NoReference):
        place = f"in the loss, {reference.estimator}" if isinstance(reference, InLoss) else "in the reward"
        rows.append(f"reference: the initial model, a forward over the batch a step; KL {place}, times {reference.coefficient:g}")
    if isinstance(config.advantages, GAE):
        critic = config.advantages.critic
        alone = f"; alone in the first {_plural(critic.warm_up_steps, 'step')}" if critic.warm_up_steps else ""
        rows.append(f"critic: a model of its own, a forward over the batch and "
                    f"{_plural(config.trainer.minibatches_per_step * critic.epochs, 'update')} a step{alone}")
    return rows


def _staleness(config: RunConfig) -> list[str]:
    every = config.weights.publish_every_steps
    policy = make_policy(config.buffer, publish_every_steps=every)
    depth = make_depth(config.buffer, policy, publish_every_steps=every)
    if isinstance(policy, FixedLag):
        promise = f"exactly {policy.lag_steps} steps"
    elif isinstance(policy, Lease):
        promise = f"at most K = {policy.max_staleness} steps; window W = {policy.effective_window}"
    elif isinstance(policy, Drop | TokenMask):
        fate = "groups with older tokens are dropped" if isinstance(policy, Drop) else "older tokens carry no gradient"
        promise = f"at most {policy.cut_staleness} steps: {fate}; engines work K = {policy.max_staleness} steps ahead"
    else:
        promise = f"K = {policy.max_staleness} steps in the mean, more for single tokens"
    moves = f"{depth.least_groups} to {depth.most_groups}, {depth.groups} at first" if depth.step_groups else f"{depth.groups}"
    return [f"staleness: {promise}", f"capacity: B = {policy.capacity_groups} groups held at once; depth: {moves}"]


def _the_whole(config: RunConfig) -> list[str]:
    steps, trainer, publish = config.run.steps, config.trainer, config.weights.publish_every_steps
    save = trainer.checkpoint_every_steps
    probe = -(-config.run.probe.every_steps // publish) * publish  # one that is due waits for a version that the engines have
    return [
        f"in all: {_plural(steps, 'step')}, {_plural(steps * trainer.updates_per_step, 'update')}, "
        f"{steps * config.buffer.groups_per_step * config.buffer.group_size:,} rollouts; fewer if the prompts end",
        f"learning rate: {_learning_rates(config)}",
        f"versions the engines get: {_shown(range(0, steps + 1, publish))}",
        f"evaluations: {_evaluations(config)}",
        f"parity probes: before steps {_shown(range(1, steps + 1, probe))}",
        f"checkpoints: after steps {_shown(range(save, steps + 1, save) if save else range(0), last=steps)}",
        f"folder: {(Path(config.run.folder) / config.run.name).absolute()}"]


def _evaluations(config: RunConfig) -> str:
    if not isinstance(config.eval, SetsEval):
        return "none"
    steps = _shown(range(0, config.run.steps + 1, config.eval.every_steps), last=config.run.steps)
    rollouts = sum(len(asked.prompts) * asked.samples_per_prompt for asked in build_eval_sets(config))
    return f"after steps {steps}; {rollouts:,} rollouts each"


def _learning_rates(config: RunConfig) -> str:
    """At the first step, at its highest, at the last."""
    steps = sorted({1, config.run.steps, *_turns(config)})
    return ", ".join(f"{config.trainer.learning_rate_at(step - 1):.3g} in step {step}" for step in steps)


def _turns(config: RunConfig) -> Iterable[int]:
    """Steps in the run at which a warm-up has ended, and a descent."""
    schedule = config.trainer.schedule
    return (step for step in (schedule.warm_up_steps, getattr(schedule, "total_steps", 0)) if 1 < step < config.run.steps)


def _shown(numbers: range, *, last: int | None = None) -> str:
    """All of a few; the first and the last of many. `last` comes after them, unless it is one of them."""
    end = [] if last is None or last in numbers else [last]
    if len(numbers) + len(end) <= _MOST_SHOWN:
        return ", ".join(map(str, [*numbers, *end]))
    return f"{', '.join(map(str, numbers[:3]))} … {[*numbers[-1:], *end][-1]}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"

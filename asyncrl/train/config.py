"""Settings of the trainer and its algorithm. Needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from asyncrl import settings
from asyncrl.correction.presets import Preset
from asyncrl.correction.spec import Correction
from asyncrl.errors import ConfigError
from asyncrl.lora_config import NO_LORA, LoRAConfig, adapters_of
from asyncrl.records import Wanted
from asyncrl.settings import Seconds, Section, Workers, refuse_unread
from asyncrl.train.advantages_config import GRPO, AdvantagesConfig
from asyncrl.train.correction_config import CorrectionConfig, NamedCorrection
from asyncrl.train.loss_config import DecoupledPPO, LossConfig
from asyncrl.train.optimizer_config import LearningRateScale, NoScale, OptimizerSettings
from asyncrl.train.parallel_config import ParallelConfig
from asyncrl.train.reference_config import InLoss, InReward, NoReference, ReferenceConfig


class TrainerConfig(OptimizerSettings, ParallelConfig):
    """Processes, optimizer and limits of the trainer."""

    processes: int = Field(default=1, ge=0, le=1024)
    """Ranks, each a child process, at most as many as an update has rollouts; 0 trains in the calling process."""
    threads: Workers = 1
    """CPU threads of each rank."""
    learning_rate_scale: LearningRateScale = NoScale()
    """What the learning rate is multiplied by, beside the schedule."""
    microbatch_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one forward; a longer sequence has one of its own."""
    logits_chunk: int = Field(default=1 << 23, ge=1)
    """Logits that are alive at a time, over all predictions and the vocabulary; a single prediction is never cut. The default takes 64 MiB
    in float32, 4194304 half of that at the same speed to a few percent, less than that slows the matrix products down."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Updates an epoch; divides `buffer.groups_per_step`. Each takes whole groups; where some have nothing to train on, shares of the
    others differ by one group at most."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward; master weights, optimizer and logprobs are float32. `auto`: bfloat16 on a GPU, float32 on a CPU
    and with `processes` 0."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """So many steps in a row with a NaN or infinite gradient end the run; a single one is skipped and counted."""
    routing_replay: bool = False
    """Of a mixture of experts: the forward sends each token to the experts that the engine recorded for it, and its router learns by their
    scores. Where the two would choose differently, for rounding alone, logprobs part by far more than rounding does. The engine must
    record them, as inline and transformers do."""
    checkpoint_every_steps: int | None = Field(default=20, ge=1)
    """A rank that dies, or a run that is resumed, costs about so many steps at most; their batches stay in shared memory. None: all since
    the start; the end of a run has a checkpoint either way."""
    record_batches_every_steps: int | None = Field(default=None, ge=1)
    """Every so many steps the batch is kept as it was corrected, logprobs, advantages and versions of each token, in
    `corrections/step-XXXXXXXX.npz` of the run's folder: the newest 8, for `asyncrl correction try`. None: never."""
    max_restarts: int = Field(default=3, ge=0)
    """So many restarts without a finished step in between end the run."""
    step_timeout_s: Seconds = 1800.0
    """A rank that takes longer for one operation counts as dead."""
    start_timeout_s: Seconds = 600.0
    """From the start of a rank to its loaded model."""

    @model_validator(mode="after")
    def _only_children_are_waited_for(self) -> TrainerConfig:
        if self.processes == 0:
            refuse_unread(self, ["max_restarts", "step_timeout_s", "start_timeout_s", "sharding"], where="trainer",
                          beside="trainer.processes", value=0)
        return self

    @model_validator(mode="after")
    def _half_precision_needs_a_rank_of_its_own(self) -> TrainerConfig:
        if self.processes == 0 and self.dtype == "bfloat16":
            raise ConfigError("trainer.dtype, trainer.processes", value=(self.dtype, self.processes),
                              allowed="bfloat16 with processes of at least 1",
                              remedy="Set trainer.processes to 1: mixed precision is FSDP2's, and needs a process group.")
        return self

    @model_validator(mode="after")
    def _a_choice_that_is_replayed_is_not_compiled(self) -> TrainerConfig:
        if self.compile and self.routing_replay:
            raise ConfigError("trainer.compile, trainer.routing_replay", value=(True, True), allowed="one of the two",
                              remedy="A compiled layer has its choice of experts inside, where nothing can be put in its place.")
        return self

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.minibatches_per_step * self.epochs


class TrainConfig(Section):
    """Everything a trainer rank needs to know of the algorithm."""

    trainer: TrainerConfig
    advantages: AdvantagesConfig = GRPO(kind="grpo")
    correction: CorrectionConfig | None = None
    """None: not chosen; right only where data cannot be stale."""
    loss: LossConfig = DecoupledPPO(kind="decoupled_ppo")
    reference: ReferenceConfig = NoReference()
    lora: LoRAConfig = NO_LORA
    """Whether the model's own weights are trained, or adapters beside them."""

    @model_validator(mode="after")
    def _the_correction_can_be_made(self) -> TrainConfig:
        self.build_correction()
        return self

    @model_validator(mode="after")
    def _weights_are_for_a_loss_that_reads_them(self) -> TrainConfig:
        correction = self.build_correction()
        if self.loss.anchor == "rollout" and (correction.level != "none" or correction.proximal == "log_linear"):
            assert self.correction is not None
            raise ConfigError("loss.kind, correction.kind", value=(self.loss.kind, self.correction.kind),
                              allowed=f"with {self.loss.kind} the correction none, or a custom one of level none: it drops, it weighs not",
                              remedy="The ratio of this loss already is against the policy that sampled; decoupled_ppo takes weights.")
        return self

    @model_validator(mode="after")
    def _a_preset_has_its_loss(self) -> TrainConfig:
        if isinstance(self.correction, NamedCorrection) and self.correction.loss == "of_preset":
            require_loss_of(self.correction.build(), loss=self.loss)
        return self

    @model_validator(mode="after")
    def _a_penalty_has_its_logprobs_and_a_reward_that_may_have_one(self) -> TrainConfig:
        if isinstance(self.reference, InReward) and self.build_correction().proximal == "log_linear":
            raise ConfigError("reference.kind, correction.proximal", value=("in_reward", "log_linear"),
                              allowed="with in_reward proximal logprobs that are computed",
                              remedy="The penalty is of the policy that is trained, not of a guess: set correction.proximal to "
                                     "recompute, or take reference.kind=in_loss.")
        if isinstance(self.reference, InReward) and self.advantages.kind == "maxrl":
            raise ConfigError("reference.kind, advantages.kind", value=("in_reward", "maxrl"), allowed="with maxrl rewards of 0 and 1",
                              remedy="Take reference.kind=in_loss, or other advantages.")
        return self

    @model_validator(mode="after")
    def _adapters_leave_nothing_else_to_freeze(self) -> TrainConfig:
        if adapters_of(self.lora) and self.trainer.frozen:
            raise ConfigError("trainer.frozen, lora.kind", value=(list(self.trainer.frozen), self.lora.kind),
                              allowed="no frozen parameters with lora, which freezes the whole model",
                              remedy="Remove trainer.frozen; lora.targets says which layers have adapters.")
        return self

    @model_validator(mode="after")
    def _groups_that_are_left_alone_have_no_advantage(self) -> TrainConfig:
        without_groups = self.advantages.kind in ("reinforce_plus_plus", "gae")
        if isinstance(self.reference, InLoss) and self.reference.equal_rewards == "leave" and without_groups:
            raise ConfigError("reference.equal_rewards, advantages.kind", value=("leave", self.advantages.kind),
                              allowed=f"pull with {self.advantages.kind}, whose groups of equal rewards have advantages",
                              remedy="Leave reference.equal_rewards out.")
        return self

    @model_validator(mode="after")
    def _what_is_recorded_was_computed(self) -> TrainConfig:
        settings = self.trainer
        if settings.record_batches_every_steps is not None and settings.updates_per_step > 1 and not self.has_proximal_pass:
            raise ConfigError("trainer.record_batches_every_steps, correction.proximal",
                              value=(settings.record_batches_every_steps, "log_linear"), allowed="proximal logprobs that a step computes",
                              remedy="Log-linear ones are a guess. Leave recording out, use one update a step, or recompute.")
        return self

    @property
    def wanted(self) -> Wanted:
        """What an engine is to record of the tokens it samples for this trainer."""
        return Wanted(kept_sets=True, routed_experts=self.trainer.routing_replay)

    def build_correction(self) -> Correction:
        """What `correct` takes; without a choice, weight 1 everywhere."""
        return Correction(level="none") if self.correction is None else self.correction.build()

    @property
    def has_proximal_pass(self) -> bool:
        """Whether a step begins with a forward over the batch. It is left out where it cannot differ from the forward that trains, with
        one update a step, a correction and loss that need one token at a time, and no penalty in the reward; and where the proximal
        logprobs are guessed."""
        correction = self.build_correction()
        needs_batch = not correction.is_token_local or self.loss.looks_at_batch or isinstance(self.reference, InReward)
        is_needless = self.trainer.updates_per_step == 1 and not needs_batch
        return correction.proximal == "recompute" and not is_needless


def validated(tree: dict[str, Any]) -> TrainConfig:
    """The configuration a plain tree describes. Raises ConfigError with the field and, for an unknown one, its nearest neighbour."""
    return settings.validated(TrainConfig, tree)


def require_loss_of(preset: Preset, *, loss: LossConfig) -> None:
    """Raise ConfigError unless this is the loss that the preset's origin has: its kind, its settings, its aggregation."""
    wanted = {"kind": preset.loss, **dict(preset.loss_settings), "aggregation": preset.aggregation}
    whole = TypeAdapter(LossConfig).validate_python(wanted | {"max_tokens": loss.max_tokens if preset.aggregation == "dr_grpo" else None})
    for field in type(whole).model_fields:
        if getattr(loss, field, None) != getattr(whole, field):
            text = ", ".join(f"{key}: {value}" for key, value in wanted.items())
            raise ConfigError(f"correction, loss.{field}", value=(preset.name, getattr(loss, field, None)),
                              allowed=f"with this preset the loss of its origin, {{{text}}}",
                              remedy=f"Write it so; or take the correction alone, {{kind: preset, name: {preset.name}, loss: any}}.")

"""The section `loss`: which function of `asyncrl.correction` is minimised, its arguments, and how token losses become one number.

Needs no torch. The settings of a section beside those of `_Loss` are the arguments of its function, by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from asyncrl.correction.clip import clip_range
from asyncrl.errors import ConfigError
from asyncrl.settings import TAGGED, Section

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"]


class _Loss(Section):
    anchor: ClassVar[Literal["proximal", "rollout"]]
    """The policy that the current one is compared with. A loss anchored at the rollout policy has the importance ratio in it already, and
    reads no weights."""
    is_token_local: ClassVar[bool] = True
    """Whether a token's loss depends on no other token's logprob: its gradient is then made in the forward pass."""
    not_arguments: ClassVar[tuple[str, ...]] = ()
    """Settings of what is found on the whole batch, for the function, before its first update; with proximal logprobs that are computed."""
    looks_at_batch: ClassVar[bool] = False
    """Whether there is such a thing."""

    kind: str
    aggregation: Aggregation = "token_mean"
    """How token losses become one number; the default is the paper's. Denominators are counted over all ranks, before correction unless
    it says `kept`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The constant length of `dr_grpo`, and of nothing else."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """So many times the entropy of a token's distribution is taken off its loss, in every loss, on the tokens a correction keeps.
    Williams & Peng 1991; recipes that do so have 1e-3 to 1e-2."""

    @model_validator(mode="after")
    def _constant_length_belongs_to_dr_grpo(self) -> _Loss:
        if (self.aggregation == "dr_grpo") != (self.max_tokens is not None):
            raise ConfigError("loss.aggregation, loss.max_tokens", value=(self.aggregation, self.max_tokens),
                              allowed="max_tokens with aggregation dr_grpo, and only there",
                              remedy="Set loss.max_tokens to the token budget of a completion, or choose another aggregation.")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the loss function."""
        return {name: getattr(self, name) for name in type(self).model_fields
                if name not in _Loss.model_fields and name not in self.not_arguments}


class _Clipped(_Loss):
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio has no gradient below 1 − this where the advantage is negative. 1707.06347."""
    clip_high: float = Field(default=0.28, ge=0)
    """Nor above 1 + this where it is positive. Clip-higher, DAPO 2503.14476."""
    dual_clip: float | None = Field(default=None, gt=1)
    """The largest ratio that counts where the advantage is negative, above 1 + clip_high. 1912.09729, which has 3."""

    @model_validator(mode="after")
    def _the_dual_clip_is_outside_the_clip(self) -> _Clipped:
        clip_range(self.clip_low, self.clip_high, self.dual_clip)
        return self


class DecoupledPPO(_Clipped):
    """The clip is around the proximal policy, importance weights account for the policy that sampled. 2505.24298."""

    anchor = "proximal"
    kind: Literal["decoupled_ppo"]


class PPO(_Clipped):
    """The clip is around the policy that sampled. 1707.06347. Takes no importance weights."""

    anchor = "rollout"
    kind: Literal["ppo"]


class Reinforce(_Loss):
    """The policy gradient under the importance weights, without a trust region. Williams 1992."""

    anchor = "proximal"
    kind: Literal["reinforce"]


class ImportanceSampling(_Loss):
    """The advantage times the ratio to the policy that sampled, neither clipped nor weighed. 1502.05477."""

    anchor = "rollout"
    kind: Literal["importance_sampling"]


class _OverSequences(_Loss):
    is_token_local = False
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number; the papers' mean over sequences. A token holds the loss of its sequence: `token_mean` weighs a
    sequence by its length."""


class _SequenceRatio(_OverSequences):
    anchor = "proximal"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The ratio has no gradient below 1 − this where the advantage is negative; 3e-4 in the paper's section 5.1."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Nor above 1 + this where it is positive; 4e-4 there."""


class GSPO(_SequenceRatio):
    """PPO's clip on the geometric mean of a sequence's ratios to the proximal policy. 2507.18071, equations 5 to 7."""

    kind: Literal["gspo"]


class GSPOToken(_SequenceRatio):
    """The value of `gspo`, but each token's advantage pushes that token alone. 2507.18071, equations 13 to 17."""

    kind: Literal["gspo_token"]


class GMPO(_OverSequences):
    """The geometric mean of a sequence's ratios to the proximal policy, each clipped by itself. 2507.20673."""

    anchor = "proximal"
    kind: Literal["gmpo"]
    log_clip_low: float = Field(default=0.4, ge=0)
    """A token's log-ratio is held above minus this where the advantage is negative; 0.4 in the paper's experiments."""
    log_clip_high: float = Field(default=0.4, ge=0)
    """And below this where it is positive."""


class CISPO(_Loss):
    """Every token keeps its gradient, its weight is clipped: the cap is a distance from 1. MiniMax-M1, 2506.13585."""

    anchor = "proximal"
    kind: Literal["cispo"]
    clip_high: float = Field(default=0.28, ge=0)
    """current / proximal counts as 1 + this at most; the paper does not print its own."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """And as 1 − this at least. None: no floor, as in the paper."""


class CISPOAbsolute(_Loss):
    """`cispo` with a ratio for its cap, as TRL and tinker have it."""

    anchor = "proximal"
    kind: Literal["cispo_absolute"]
    cap: float = Field(default=5.0, gt=1)
    """current / proximal counts as this at most; 5 is TRL's for ScaleRL, 2510.13786."""


class SAPO(_Loss):
    """A sigmoid gate in place of the clip. 2511.20347."""

    anchor = "proximal"
    kind: Literal["sapo"]
    aggregation: Aggregation = "seq_mean_token_mean"
    """How token losses become one number; the paper's is a mean over sequences."""
    temperature_positive: float = Field(default=1.0, gt=0)
    """The gate narrows as it grows; of tokens with a positive advantage, 1 in the paper."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """Of the others; 1.05 in the paper."""


class ASPO(_Loss):
    """Tokens of positive advantage weigh proximal / current: the least likely are pushed up most. 2510.06062."""

    anchor = "proximal"
    kind: Literal["aspo"]
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """No gradient below 1 − this where the advantage is negative."""
    clip_high: float = Field(default=0.28, ge=0)
    """Nor above 1 + this where it is positive."""
    cap_positive: float = Field(default=3.0, gt=1)
    """The largest weight of a token of positive advantage; the authors' code has 3."""
    cap_negative: float = Field(default=3.0, gt=1)
    """And of the others."""


class DPPOTV(_Loss):
    """A token stops where its probability has moved too far from the rollout policy's the way its advantage pushes. 2602.04879."""

    anchor = "rollout"
    kind: Literal["dppo_tv"]
    low: float = Field(default=0.15, ge=0, lt=1)
    """So far down, a difference of probabilities; 0.15 in the paper."""
    high: float = Field(default=0.15, ge=0, lt=1)
    """So far up."""
    cap: float = Field(default=20.0, gt=1)
    """The largest ratio that counts; 20 is verl's."""


class DPPOKL(_Loss):
    """`dppo_tv` with the binary KL(rollout ‖ current) for its distance. 2602.04879."""

    anchor = "rollout"
    kind: Literal["dppo_kl"]
    limit: float = Field(default=0.05, ge=0)
    """A token stops beyond it, in nats; 0.05 in the paper."""
    cap: float = Field(default=20.0, gt=1)
    """The largest ratio that counts; 20 is verl's."""


class PrimeRLDPPO(_Loss):
    """prime-rl's DPPO: the mask of `dppo_tv`, and a squared log-ratio that draws every token back to the rollout policy."""

    anchor = "rollout"
    kind: Literal["prime_rl_dppo"]
    low: float = Field(default=0.2, ge=0, lt=1)
    """A token stops so far down, a difference of probabilities."""
    high: float = Field(default=0.2, ge=0, lt=1)
    """And so far up."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Of the squared log-ratio."""


class PrimeRLIPO(_Loss):
    """prime-rl's IPO: as `prime_rl_dppo`, but a token stops wherever it has moved too far, whatever its advantage."""

    anchor = "rollout"
    kind: Literal["prime_rl_ipo"]
    threshold: float = Field(default=0.1, ge=0, lt=1)
    """A token stops so far away, a difference of probabilities."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Of the squared log-ratio."""


class M2PO(_Loss):
    """PPO's clip around the policy that sampled, as wide as the second moment of the batch's log-ratios allows. 2510.01161. Looks at the
    proximal policy, which costs a forward over the batch."""

    anchor = "rollout"
    not_arguments = ("limit", "exact")
    looks_at_batch = True
    kind: Literal["m2po"]
    limit: float = Field(default=0.04, gt=0)
    """Mean squared log-ratio of proximal to rollout, over the tokens that push away, to which the clip brings it; 0.04 in the paper."""
    exact: bool = True
    """The clip at which the mean is just that. false: the authors' code, the largest log-ratio of the batch that keeps it below."""
    min_clip_low: float = Field(default=0.0, ge=0, le=1)
    """The clip lies at 1 − this or lower; the authors' code has 0.3."""
    min_clip_high: float = Field(default=0.0, ge=0)
    """And at 1 + this or higher; 0.5 there."""


class GEPO(_OverSequences):
    """PPO's clip on a sequence's probability against what its group was expected to have. 2508.17850. The expectation is of the tokens that
    the correction keeps, which costs a forward over the batch."""

    anchor = "rollout"
    looks_at_batch = True
    kind: Literal["gepo"]
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio has no gradient below 1 − this where the advantage is negative; 0.2 in the authors' code."""
    clip_high: float = Field(default=0.2, ge=0)
    """Nor above 1 + this where it is positive."""


class VESPO(_Loss):
    """The ratio W of the whole sequence to the rollout policy, a product, reshaped to W^k · e^(λ(1 − W)). 2602.10693."""

    anchor = "rollout"
    is_token_local = False
    kind: Literal["vespo"]
    power_positive: float = Field(default=2.0, gt=0)
    """k where the advantage is not negative."""
    decay_positive: float = Field(default=3.0, gt=0)
    """λ there."""
    power_negative: float = Field(default=3.0, gt=0)
    """k where it is negative."""
    decay_negative: float = Field(default=2.0, gt=0)
    """λ there."""


class DRO(_Loss):
    """No ratio, and a squared log-ratio that holds the policy to the one that sampled. 2405.19107, in tinker's form."""

    anchor = "rollout"
    kind: Literal["dro"]
    aggregation: Aggregation = "token_sum"
    """How token losses become one number; tinker sums."""
    beta: float = Field(default=0.05, ge=0)
    """Of half the square."""


LossConfig = Annotated[
    DecoupledPPO | PPO | Reinforce | ImportanceSampling | GSPO | GSPOToken | GMPO | CISPO | CISPOAbsolute | SAPO | ASPO | DPPOTV | DPPOKL
    | PrimeRLDPPO | PrimeRLIPO | M2PO | GEPO | VESPO | DRO, TAGGED]

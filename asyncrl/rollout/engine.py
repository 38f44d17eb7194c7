"""What the rest of the library knows of an engine: it turns requests into tagged chunks and takes weights while paused."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError
from asyncrl.lora_config import LoRA, LoRAConfig, adapters_of
from asyncrl.paths import RunPaths
from asyncrl.records import NOTHING, NOTHING_WANTED, TokenRecords, Wanted
from asyncrl.types import KEPT_SET_FIELDS, Sampling, Status
from asyncrl.weights.manifest import Manifest


class Interruption(enum.Enum):
    """What a weight update does to requests that are running."""

    KEEP = "keep"
    """They go on with the keys and values they have; later tokens are stamped `kv_fresh=False`."""
    RECOMPUTE = "recompute"
    """They go on with keys and values computed again under the new weights."""
    DRAIN = "drain"
    """They finish first; no new one starts meanwhile."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; a run that needs more is refused at start."""

    interruptions: frozenset[Interruption]
    in_place_recompute: bool
    """False: `pause(RECOMPUTE)` ends running requests with `Status.INTERRUPTED` and the session resubmits the prefix."""
    per_request_seed: bool
    per_request_temperature: bool
    stop_strings: bool
    bit_reproducible: bool
    """The requests of one `wave` give the same bits whenever they come and whatever else runs."""
    context_tokens: int
    """Prompt plus completion may not exceed this."""
    lowest_temperature: float = 0.0
    """Below it the engine would sample at another one."""
    truncates: bool = False
    """`top_p`, `top_k` and `min_p`, applied after the temperature, min_p first, top_p last; logprobs are then those of the renormalised
    distribution."""
    kept_sets: bool = False
    """It records what these left of the vocabulary at each sampled token. Without, completions that are trained on may not ask for them."""
    routed_experts: bool = False
    """It records, with a mixture of experts, where each token went that passed through the model."""
    lora: Literal["none", "shared", "per_request"] = "none"
    """How it serves adapters beside the model: `shared` are changed in place for all requests; with `per_request` each keeps those it
    began with, so none can go on under the next version with what it has: no KEEP, and RECOMPUTE resubmits."""
    adapters: LoRA | None = None
    """Those it was made with."""

    def serving(self, adapters: LoRA | None) -> Capabilities:
        """Of the same engine, made with these adapters."""
        if adapters is None or self.lora != "per_request":
            return dataclasses.replace(self, adapters=adapters)
        interruptions = self.interruptions - {Interruption.KEEP}
        return dataclasses.replace(self, adapters=adapters, interruptions=interruptions, in_place_recompute=False)

    sleep: bool = False
    """It can give weights and key-value cache back while others need the memory, and take them anew."""
    own_process: bool = False
    """It lives in a child, and receives weights while this process does other things."""

    def unfollowed(self, sampling: Sampling) -> tuple[str, ...]:
        """Fields beyond temperature and stop strings that the engine does not have."""
        return tuple(name for name in sampling.biased_fields() if not (self.truncates and name in KEPT_SET_FIELDS))


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One completion to write. `tokens` is the prompt plus whatever was already written."""

    request_id: str
    tokens: NDArray[np.int32]
    sampling: Sampling
    """`max_new_tokens` is what is left of the budget."""
    seed: int
    """Of this request's random stream; ignored by engines without `per_request_seed`."""
    wave: str | None = None
    """Sampled together with the requests of the same wave that wait, and no other, by engines that are `bit_reproducible`: how many
    rows a matrix product has may change its last bits. None: with whatever waits."""
    wanted: Wanted = NOTHING_WANTED
    """What is to be recorded; of an engine that can."""
    is_resubmitted: bool = False
    """`tokens` ends with what was written before an interruption."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of an engine's forward passes since it last told of them; one that reads and writes is shared by its tokens."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens one policy version sampled in a row; the last chunk of a request carries `finish`."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """log softmax(logits / temperature) of each token, [n] float32."""
    policy_version: int
    kv_fresh: bool
    finish: Status | None = None
    records: TokenRecords = NOTHING
    """What was wanted: the n kept sets; the experts of each token that newly passed through the model, of which the last is the one
    before the last of `tokens`. Those of a part of the prompt whose keys were cached may be missing."""
    passes: Passes | None = None
    """Of the whole engine, for whatever request, told with one chunk; None where the engine does not measure them."""


@dataclass(frozen=True, slots=True)
class Ack:
    """An engine holds `version`, proved by `state_hash`."""

    version: int
    state_hash: int
    pause_s: float
    """From the pause to the end of the apply."""
    recomputed_tokens: int
    """Tokens whose keys and values are computed again because of this update."""


@dataclass(frozen=True, slots=True)
class Health:
    """A live engine's answer."""

    version: int
    running_requests: int
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Slept:
    """What an engine gave back by falling asleep."""

    freed_bytes: int
    """Of weights and key-value cache."""
    resident_bytes_before: int
    """Of the engine's process, in RAM, as the kernel counts it; of an engine in the calling process all of that."""
    resident_bytes: int
    """The same, asleep."""


class Engine(Protocol):
    """The contract; docs/interfaces.md has it in prose. `name` is unique in the run."""

    name: str
    capabilities: Capabilities

    async def start(self, paths: RunPaths) -> None:
        """Bring the engine up from its model folder, before anything else and again after `close`. The first apply is an anchor."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks in order, the last with `finish`. Closing the iterator cancels the request. Waits while paused.

        Raises EngineError (final: the request cannot succeed) or ChildDied.
        """

    async def pause(self, kind: Interruption) -> None:
        """Returns when no token can be sampled and every sampled one has been delivered. Raises AbortNotHonoured."""

    async def fetch(self, manifest: Manifest) -> None:
        """Pull and verify a version while sampling goes on, so that the pause covers the writing alone. Writes nothing.

        Raises WrongBase or WeightSyncError; then, and without it, `apply` fetches.
        """

    async def apply(self, manifest: Manifest) -> Ack:
        """Verify, then write the weights; only while paused. Raises WrongBase or WeightSyncError; the version stays then."""

    async def resume(self) -> None:
        """Sample again."""

    async def sleep(self) -> Slept:
        """Give weights and key-value cache back; only while paused, with no request that holds a part of the cache.

        Until `wake` and the next anchor nothing can be applied or sampled; requests wait as under any pause. Raises ConfigError without
        the capability, EngineError.
        """

    async def wake(self) -> None:
        """Take the memory again. The engine stays paused, and holds no version until an anchor is applied. Raises EngineError."""

    async def health(self) -> Health:
        """Raises ChildDied when the engine is gone."""

    async def close(self) -> None:
        """Leaves no process behind; safe to call twice."""


def require(capabilities: Capabilities, sampling: Sampling, interruption: Interruption, *, engine: str) -> None:
    """Raise ConfigError when a run that trains on what is sampled needs what the engine lacks."""
    if interruption not in capabilities.interruptions:
        adapters = capabilities.adapters is not None
        raise ConfigError("weights.interruption, lora.kind" if adapters else "weights.interruption",
                          value=(interruption.value, "lora") if adapters else interruption.value,
                          allowed=f"one of {sorted(kind.value for kind in capabilities.interruptions)} with {engine}"
                                  f"{', where a request keeps the adapters it began with' if adapters else ''}",
                          remedy="Choose another interruption or another engine.")
    require_sampling(capabilities, sampling, engine=engine)
    if sampling.truncates and not capabilities.kept_sets:
        name = next(name for name in sampling.biased_fields() if name in KEPT_SET_FIELDS)
        raise ConfigError(f"sampling.{name}, engine.kind", value=(getattr(sampling, name), engine),
                          allowed=f"the neutral value alone with {engine}, which does not record what it leaves out",
                          remedy="It renormalises over a kept set the trainer does not know, so every importance ratio would be off by "
                                 "the kept mass. Take an engine that records the sets, transformers or inline, or remove the field.")


def require_adapters(capabilities: Capabilities, lora: LoRAConfig, *, engine: str) -> None:
    """Raise ConfigError unless an engine has the adapters that are trained, or has none where none are."""
    held, trained = capabilities.adapters, adapters_of(lora)
    if trained and capabilities.lora == "none":
        raise ConfigError("lora.kind, engine.kind", value=("lora", engine), allowed="an engine that serves adapters beside the model",
                          remedy="Choose the inline or the transformers engine, or vLLM; or train the whole model, lora: none.")
    if (held and held.shape) != (trained and trained.shape):
        raise ConfigError("lora, engine.lora", value=(trained, held),
                          allowed=f"the same rank, alpha, rslora and targets in the trainer and in {engine}, or none in both",
                          remedy="Give the engine the lora that the trainer has: what the trainer publishes is for such layers alone.")


def require_sleep(capabilities: Capabilities, *, engine: str) -> None:
    """Raise ConfigError when an engine is to sleep that cannot."""
    if not capabilities.sleep:
        raise ConfigError("colocation.kind, engine.kind", value=("turns", engine), allowed="engines whose capabilities say sleep",
                          remedy="Take the transformers engine or the inline one, or set colocation.kind=none.")


def require_sampling(capabilities: Capabilities, sampling: Sampling, *, engine: str) -> None:
    """Raise ConfigError when completions are to be sampled as the engine cannot."""
    unfollowed = capabilities.unfollowed(sampling)
    if unfollowed:
        raise ConfigError(f"sampling.{unfollowed[0]}", value=getattr(sampling, unfollowed[0]),
                          allowed=f"the neutral value alone with {engine}", remedy="Remove it, or choose another engine.")
    if sampling.stop and not capabilities.stop_strings:
        raise ConfigError("sampling.stop", value=sampling.stop, allowed=f"no stop strings with {engine}",
                          remedy="End completions with an end-of-sequence token, or choose an engine that has stop strings.")
    if sampling.temperature < capabilities.lowest_temperature:
        raise ConfigError("sampling.temperature", value=sampling.temperature, remedy="Raise it, or choose another engine.",
                          allowed=f"at least {capabilities.lowest_temperature:g} with {engine}")

"""Settings of weight sync. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.settings import TAGGED, Seconds, Section, refuse_unread


class StoreConfig(Section):
    """Versions are files; engines pull them."""

    kind: Literal["store"] = "store"
    root: str | None = Field(default=None, min_length=1)
    """A folder that trainer and engines share, or a URL that fsspec knows, such as `s3://bucket/weights`, with its credentials where its
    package looks for them. Versions lie below it under the run's name. None: the run's shared memory, for engines on this machine."""
    compression: Literal["none", "zstd"] = "none"
    """Of parts. `zstd`, over byte planes, makes a delta a quarter smaller at 1% density, at some 200 MB/s a rank: for slower lines."""
    keep_bytes: Annotated[int, Field(ge=0)] | None = 0
    """Versions that no serving engine needs stay while all files together have no more bytes; None: for ever. With 0, which leaves shared
    memory to others, an engine that comes late is given an anchor by the trainer."""


class NcclConfig(Section):
    """Trainer ranks broadcast every part to all engines at once: by NCCL between GPUs, by gloo where a member has none of its own."""

    kind: Literal["nccl"] = "nccl"
    timeout_s: Seconds = 30.0
    """How long members are waited for, and one collective of 64 MiB; whoever takes longer is left out, and the others go on. A fetch
    takes at most three times as long, which must be within `weights.fetch_timeout_s`."""


Transport = Annotated[StoreConfig | NcclConfig, TAGGED]
"""The ways there are."""


class WeightsConfig(Section):
    """How new weights get from the trainer to the engines."""

    publish_every_steps: int = Field(default=1, ge=1)
    """Engines see versions 0, k, 2k …"""
    interruption: Literal["keep", "recompute", "drain"] = "keep"
    """What an update does to running requests: go on with the old keys and values, with recomputed ones, or finish first."""
    drain_timeout_s: Seconds = 600.0
    """With `drain`: an engine whose running rollouts take longer is fenced."""
    fetch_timeout_s: Seconds = 300.0
    """An engine that takes longer to pull and verify a version, beside sampling, is fenced: 30 GB at 100 MB/s."""
    apply_timeout_s: Seconds = 120.0
    """An engine that takes longer to pause, to apply a version, or to resume, is fenced."""
    engine_restarts: int = Field(default=3, ge=0)
    """A fenced engine that cannot be refilled is started anew, so many times in a row without an update it took part in; then, and at once
    with 0, it is closed for good. What kills an engine thrice, as a lack of memory does, will again."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of published parameters, rounded to nearest even from the trainer's float32. Buffers keep their own dtype."""
    anchor_every_versions: int | None = Field(default=None, ge=1)
    """Publish every n-th version whole instead of as a delta; None: the first alone, and whenever an engine needs one."""
    transport: Transport = StoreConfig()
    """The way there."""

    @model_validator(mode="after")
    def _only_a_drain_waits_for_rollouts(self) -> WeightsConfig:
        if self.interruption != "drain":
            refuse_unread(self, ["drain_timeout_s"], where="weights", beside="weights.interruption", value=self.interruption)
        return self

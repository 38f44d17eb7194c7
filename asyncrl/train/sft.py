"""Supervised training: cross-entropy on completions, by the policy, packing, optimizer, ranks and checkpoints of RL. Needs no torch.

    examples ──▶ batch of step n, a function of seed and n ──▶ ranks: forward, −Σ logprob / learned tokens of the batch ──▶ one update

A step is an update and makes a version; the learning rate, the batch and the order follow from its number alone, so a restored trainer goes
on with the same bits as one that never stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncrl.channel import Reply
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.lora_config import adapters_of, require_peft
from asyncrl.model_folder import model_folder
from asyncrl.paths import RunPaths, make_shared_folder
from asyncrl.train import checkpoint_store
from asyncrl.train.config import validated
from asyncrl.train.examples import Example, ExampleReader, PackedExamples, Row, jsonl_rows
from asyncrl.train.export_form import ADAPTER_FOLDER, SHARD_BYTES, ExportDtype, ExportForm
from asyncrl.train.history import Saving, restore_request
from asyncrl.train.nonfinite import NonfiniteLimit
from asyncrl.train.rank_group import RankGroup, start_ranks
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.sft_config import refuse_settings_of_rl
from asyncrl.weights.ends import TransportSpec

Data = Iterable[Row] | str | Path
"""Rows as docs/sft.md has them, or the path of a JSONL file of such."""


@dataclass(frozen=True, slots=True)
class SFTStep:
    """What one update did."""

    index: int
    """From 1."""
    loss: float
    """Mean of −logprob over the batch's learned tokens, in nats, before the update."""
    tokens: int
    """Learned tokens of the batch."""
    grad_norm: float
    """Before clipping; NaN or infinite where the gradient was, and nothing changed."""
    learning_rate: float
    skipped: str
    """Why the weights did not change: `nonfinite`, `zero`, or not at all."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well the held-out examples are known."""

    loss: float
    """Mean of −logprob over all their learned tokens."""
    accuracy: float
    """Mean over examples of the probability that sampling at temperature 1 writes all that is learned of one."""
    tokens: int


class SFTTrainer:
    """Trains the model of a Hugging Face folder on examples; other settings are the fields of `TrainerConfig`, and `lora`, as in `Trainer`.

    Args:
        model: the folder, or a Hugging Face id, which is fetched.
        examples: a list, gone through `epochs` times, each time in another order; or an iterator, taken as it comes.
        held_out: what `evaluate` measures on.
        batch_size: examples of an update; the last one may have fewer.
        epochs: passes over a list.
        max_steps: updates at most; an iterator needs it.
        seed: of the order.

    Raises ConfigError before any process starts, with the number of a row that cannot be trained on.
    """

    def __init__(self, model: str | Path, examples: Data, *, held_out: Data = (), batch_size: int = 32, epochs: int = 1,
                 max_steps: int | None = None, seed: int = 0, **settings: Any) -> None:
        self.model = model_folder(model)
        self.config = validated({"lora": settings.pop("lora", "none"), "trainer": settings})
        if adapters_of(self.config.lora):
            require_peft()
        refuse_settings_of_rl(self.config.trainer)
        reader = ExampleReader(self.model)
        self._ahead = reader.read(_rows(examples, field="examples"), field="examples")
        self._examples = list(self._ahead) if isinstance(examples, Sequence | Path) else None
        self._held_out = list(reader.read(_rows(held_out, field="held_out"), field="held_out"))
        self._batch_size, self._epochs, self._seed = batch_size, epochs, seed
        self.total_steps = _total_steps(self._examples, batch_size=batch_size, epochs=epochs, max_steps=max_steps)
        """Updates in all."""
        self.version = 0
        """Updates so far, skipped ones included."""
        self._nonfinite = NonfiniteLimit(self.config.trainer.max_nonfinite_steps)
        self._ranks: RankGroup | None = None
        self._paths: RunPaths | None = None

    async def start(self, folder: str | Path, *, deterministic: bool = False) -> None:
        """Bring the ranks up; logs go to `folder`. Raises ConfigError, ChildDied or TimeoutError, leaving no process."""
        settings = self.config.trainer
        self._paths = paths = RunPaths(root=Path(folder), shared=make_shared_folder())
        if settings.processes:
            paths.logs.mkdir(parents=True, exist_ok=True)
        first = RankSpec(model=str(self.model.resolve()), rank=0, world_size=max(1, settings.processes),
                         rendezvous=str(paths.shared / "rendezvous") if settings.processes else None, transport=TransportSpec.of(paths),
                         published_dtype="bfloat16", config=self.config, deterministic=deterministic)
        self._ranks = await start_ranks(first, logs=paths.logs)

    async def steps(self) -> AsyncIterator[SFTStep]:
        """Every update that is left."""
        while self.version < self.total_steps:
            yield await self.step()

    async def step(self) -> SFTStep:
        """One update. Raises RunAborted when too many in a row had a gradient that is not finite, ChildDied when a rank died: what is saved
        stays good for `restore`."""
        batch = PackedExamples.of(self._batch(self.version))
        reply = (await self._call("fit", {"version": self.version}, arrays=batch.arrays()))[0].body
        self.version += 1
        self._nonfinite.after_step(nonfinite=reply["skipped"] == "nonfinite")
        return SFTStep(index=self.version, **reply)

    async def evaluate(self) -> HeldOut:
        """Measure on all held-out examples, as many at once as a batch has. Raises ConfigError without any."""
        if not self._held_out:
            raise ConfigError("held_out", value="no examples", allowed="at least one example to measure on", remedy="Give held_out.")
        sums: list[float] = []
        tokens = 0
        for start in range(0, len(self._held_out), self._batch_size):
            share = self._held_out[start:start + self._batch_size]
            packed = PackedExamples.of(share)
            arrays = packed.arrays() | {"temperatures": np.ones(len(share), np.float32)}
            logprobs = (await self._call("score", arrays=arrays))[0].arrays["logprobs"].astype(np.float64)
            sums += [float(logprobs[first:end].sum()) for first, end in itertools.pairwise(packed.cu_seqlens.tolist())]
            tokens += packed.num_loss_tokens
        return HeldOut(loss=-math.fsum(sums) / tokens, accuracy=float(np.exp(sums).mean()), tokens=tokens)

    async def save(self, path: str | Path) -> None:
        """Write a checkpoint folder; an older one at `path` is replaced once this one is whole. Raises NonFiniteError, CheckpointError."""
        folder = Path(path)
        try:
            with checkpoint_store.disk_errors_named(folder):
                place = checkpoint_store.begin(folder)
                begun = (await self._call("save", {"folder": str(place)}))[0].body
                written = [reply.body for reply in await self._call("saved", {"wait": True})]
                saving = Saving(folder, version=self.version, updates=begun["updates"], run_epoch=0,
                                state=json.dumps(self._order()).encode(), model=begun["model"])
                saving.commit(written)
        except BaseException:
            checkpoint_store.abandon(folder)
            raise

    async def restore(self, path: str | Path) -> None:
        """Load a checkpoint folder, saved by any number of ranks, and go on with the batch after it.

        Raises CheckpointError, for one saved with another batch_size, seed or examples too, and ConfigError where an iterator would have
        to go back.
        """
        folder = Path(path)
        manifest = checkpoint_store.verified(folder)
        self._require_order(folder)
        if self._examples is None and manifest.version < self.version:
            raise ConfigError("examples", value=f"an iterator, after step {self.version}",
                              allowed=f"a list, to go back to step {manifest.version}",
                              remedy="An iterator cannot go back: give a list, or restore a new trainer with the iterator from its start.")
        await self._call("restore", restore_request(folder, manifest))
        if self._examples is None:
            for _ in itertools.islice(self._ahead, (manifest.version - self.version) * self._batch_size):
                """What the steps until then were trained on."""
        self.version = manifest.version

    async def export(self, path: str | Path, *, dtype: ExportDtype = "source", max_shard_bytes: int = SHARD_BYTES) -> None:
        """Write a Hugging Face folder, which reinforcement learning starts from. Raises what `Trainer.export` does."""
        form = ExportForm(dtype, max_shard_bytes)
        await self._call("export", {"folder": str(path), "form": dataclasses.asdict(form)})
        lora = adapters_of(self.config.lora)
        if lora and lora.export_adapters:
            await self._call("export_adapters", {"folder": str(Path(path) / ADAPTER_FOLDER)})

    async def close(self) -> None:
        """End every rank. Safe to call twice, and before `start`."""
        try:
            if self._ranks is not None:
                await self._ranks.close()
        finally:
            self._ranks = None
            if self._paths is not None:
                shutil.rmtree(self._paths.shared, ignore_errors=True)

    async def _call(self, op: str, body: dict[str, Any] | None = None, *, arrays: dict[str, NDArray[Any]] | None = None) -> list[Reply]:
        assert self._ranks is not None, "start() comes first"
        return await self._ranks.call(op, body or {}, arrays=arrays or {}, timeout_s=self.config.trainer.step_timeout_s)

    def _order(self) -> dict[str, Any]:
        """What batches follow from, beside the numbers of their steps; of an iterator nobody can tell the rows."""
        if self._examples is None:
            return {"batch_size": self._batch_size}
        digest = xxhash.xxh3_128()
        for example in self._examples:
            digest.update(example.tokens.tobytes())
            digest.update(example.loss_mask.tobytes())
        return {"batch_size": self._batch_size, "seed": self._seed, "examples": f"{len(self._examples)}, xxh3-128 {digest.hexdigest()}"}

    def _require_order(self, folder: Path) -> None:
        """Raise CheckpointError unless the checkpoint goes on with the batches that it would have gone on with."""
        ours = self._order()
        try:
            saved = dict(json.loads(checkpoint_store.read_state(folder)))
        except (TypeError, ValueError):
            raise CheckpointError(f"{folder} was not saved by a supervised trainer: nothing says which examples come next.") from None
        for name in sorted(ours.keys() | saved.keys()):
            if saved.get(name) != ours.get(name):
                raise CheckpointError(f"{folder} was saved with {name} {saved.get(name)}, here it is {ours.get(name)}: its next batches "
                                      "would be others. Restore with what it was saved with, or start anew from its export.")

    def _batch(self, step: int) -> list[Example]:
        """Of step 0, 1, …: the next rows of the epochs' orders, one after another. Raises ConfigError where an iterator has ended."""
        if self._examples is None:
            batch = list(itertools.islice(self._ahead, self._batch_size))
            if not batch:
                raise ConfigError("examples", value="no more examples", allowed=f"enough for {self.total_steps} steps",
                                  remedy="Start again at the end of the data (itertools.cycle), or give a list and epochs.")
            return batch
        rows = len(self._examples)
        places = range(step * self._batch_size, min((step + 1) * self._batch_size, self._epochs * rows))
        orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(rows) for epoch in {place // rows for place in places}}
        return [self._examples[orders[place // rows][place % rows]] for place in places]


def _rows(data: Data, *, field: str) -> Iterable[Row]:
    return jsonl_rows(Path(data), field=field) if isinstance(data, str | Path) else data


def _total_steps(examples: list[Example] | None, *, batch_size: int, epochs: int, max_steps: int | None) -> int:
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("max_steps", 1 if max_steps is None else max_steps)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(name, value=value, allowed="an integer of at least 1", remedy="Change it.")
    if examples is None:
        if max_steps is None:
            raise ConfigError("max_steps", value=None, allowed="a number, for examples of an iterator", remedy="Set it, or give a list.")
        return max_steps
    if not examples:
        raise ConfigError("examples", value="no examples", allowed="at least one", remedy="Check the data.")
    steps = math.ceil(epochs * len(examples) / batch_size)
    return steps if max_steps is None else min(steps, max_steps)

"""Death at every operation, with ranks in the test's own process that die on demand."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from asyncrl.channel import Reply
from asyncrl.errors import CheckpointError, ChildDied, RemoteError, RunAborted
from asyncrl.paths import RunPaths
from asyncrl.train.rank_group import InlineRank
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.trainer import Trainer
from asyncrl.weights.manifest import Manifest
from tests.train.train_data import random_batch, sequence

T = TypeVar("T")


@dataclass
class Fate:
    """Which calls of the run kill the rank, counted from 0."""

    deaths: Mapping[int, str] = field(default_factory=dict)
    """By number of the call: "before" it is done, or "after", its answer lost; "error" fails it after it was done, and the rank lives;
    "silence" never answers."""
    calls: list[str] = field(default_factory=list)
    disturbed: bool = False
    """Started anew, the rank comes up with slightly other weights."""
    starts: int = 0

    async def start(self, specs: Sequence[RankSpec], *, logs: Path, start_timeout_s: float) -> "MortalRank":
        self.starts += 1
        rank = MortalRank(dataclasses.replace(specs[0], rendezvous=None), fate=self)
        if self.disturbed and self.starts > 1:
            with torch.no_grad():
                rank._rank._lm.model.norm.weight.mul_(1.5)
        return rank


class MortalRank(InlineRank):
    """The real rank, with a fate."""

    def __init__(self, spec: RankSpec, *, fate: Fate) -> None:
        super().__init__(spec)
        self._fate = fate
        self._dead = False

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, Any], timeout_s: float) -> list[Reply]:
        number = len(self._fate.calls)
        self._fate.calls.append(op)
        death = self._fate.deaths.get(number)
        if death == "silence":
            await asyncio.Event().wait()
        self._dead = self._dead or death == "before"
        if self._dead:
            raise ChildDied("killed by signal 9")
        replies = await super().call(op, body, arrays=arrays, timeout_s=timeout_s)
        self._dead = death == "after"
        if self._dead:
            raise ChildDied("killed by signal 9")
        if death == "error":
            raise RemoteError("out of memory")
        return replies

    async def kill(self) -> None:
        self._dead = True
        self._rank._writer.shutdown()


def with_mortal_rank(model: Path, folder: Path, fate: Fate, use: Callable[[Trainer], Awaitable[T]], monkeypatch: pytest.MonkeyPatch,
                     **settings: object) -> T:
    monkeypatch.setattr("asyncrl.train.rank_group.ChildRanks", fate)

    async def main() -> T:
        paths = RunPaths(root=folder / "run", shared=folder / "shared")
        paths.make()
        trainer = Trainer(model, correction="token_tis", learning_rate=1e-2, processes=1, **{"checkpoint_every_steps": 2, **settings})
        await trainer.start(paths)
        try:
            return await use(trainer)
        finally:
            await trainer.close()

    return asyncio.run(main())


def run_script(model: Path, folder: Path, fate: Fate, monkeypatch: pytest.MonkeyPatch, *, publish_every_steps: int = 1,
               **settings: object) -> list[Manifest]:
    """Three steps, published, with a checkpoint after the second; the manifests."""
    async def use(trainer: Trainer) -> list[Manifest]:
        manifests = [await trainer.publish()]
        for version in range(3):
            result = await trainer.step(random_batch(version, version=version))
            assert result.version == version + 1
            if trainer.checkpoint_due:
                await trainer.checkpoint()
            await trainer.score([sequence([2, 3], [4])])
            await trainer.settle()
            if trainer.version % publish_every_steps == 0:
                manifests.append(await trainer.publish())
        if manifests[-1].version != trainer.version:
            manifests.append(await trainer.publish())
        return manifests

    return with_mortal_rank(model, folder, fate, use, monkeypatch, **settings)


UNDISTURBED = ["publish", "committed", "step", "score", "publish", "committed", "step", "save", "score", "saved", "publish", "committed",
               "step", "score", "publish", "committed"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_at_any_operation_changes_no_published_version(when: str, tiny: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    fate = Fate()
    expected = run_script(tiny, tmp_path / "undisturbed", fate, monkeypatch)
    assert fate.calls == UNDISTURBED
    for number in range(len(UNDISTURBED)):
        disturbed = Fate(deaths={number: when})
        found = run_script(tiny, tmp_path / f"{number}", disturbed, monkeypatch)
        assert disturbed.starts == 2
        assert [(m.version, m.run_epoch, m.state_hash) for m in found] == [(m.version, m.run_epoch, m.state_hash) for m in expected]


@pytest.mark.parametrize("checkpoint_every_steps", [1, 3, None])
def test_nor_does_one_between_publications_and_checkpoints_that_do_not_coincide(checkpoint_every_steps: int | None, tiny: Path,
                                                                               tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"publish_every_steps": 2, "checkpoint_every_steps": checkpoint_every_steps}
    fate = Fate()
    expected = run_script(tiny, tmp_path / "undisturbed", fate, monkeypatch, **settings)
    for number in range(len(fate.calls)):
        found = run_script(tiny, tmp_path / f"{number}", Fate(deaths={number: "after"}), monkeypatch, **settings)
        assert [(m.version, m.run_epoch, m.state_hash) for m in found] == [(m.version, m.run_epoch, m.state_hash) for m in expected]


def test_a_step_that_fails_half_way_is_forgotten(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_script(tiny, tmp_path / "undisturbed", Fate(), monkeypatch)

    async def use(trainer: Trainer) -> Manifest:
        await trainer.publish()
        with pytest.raises(RemoteError, match="out of memory"):
            await trainer.step(random_batch(0))
        assert trainer.version == 0
        assert (await trainer.step(random_batch(0))).version == 1
        return await trainer.publish()

    found = with_mortal_rank(tiny, tmp_path / "disturbed", Fate(deaths={2: "error"}), use, monkeypatch)
    assert found.state_hash == expected[1].state_hash


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_while_restoring_is_recovered_from(when: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(trainer: Trainer) -> tuple[Manifest, Manifest]:
        await trainer.step(random_batch(0))
        published = await trainer.publish()
        await trainer.save(tmp_path / "saved")
        await trainer.step(random_batch(1, version=1))
        await trainer.restore(tmp_path / "saved")
        assert trainer.version == 1
        return published, await trainer.publish()

    fate = Fate(deaths={6: when})
    published, again = with_mortal_rank(tiny, tmp_path, fate, use, monkeypatch, checkpoint_every_steps=None)
    assert fate.calls[6] == "restore"
    assert (again.version, again.base, again.run_epoch, again.state_hash) == (1, None, 1, published.state_hash)


def test_ranks_that_cannot_be_brought_to_their_version_do_nothing_else(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is damaged: fresh ranks hold the initial model, which must not pass for the trained one."""
    async def use(trainer: Trainer) -> None:
        await trainer.step(random_batch(0))
        await trainer.checkpoint()
        await trainer.settle()
        (tmp_path / "run" / "checkpoints" / "step-00000001" / "rank-00000-000.safetensors").write_bytes(b"")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is not what was written"):
                await trainer.export(tmp_path / "export")

    with_mortal_rank(tiny, tmp_path, Fate(deaths={3: "before"}), use, monkeypatch, checkpoint_every_steps=1)


def test_saving_over_the_checkpoint_that_recovery_starts_from(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(trainer: Trainer) -> Manifest:
        for version in range(3):
            await trainer.step(random_batch(version, version=version))
            if trainer.checkpoint_due:
                await trainer.checkpoint()
                await trainer.settle()
        await trainer.save(tmp_path / "run" / "checkpoints" / "step-00000002")
        return await trainer.publish()

    expected = run_script(tiny, tmp_path / "undisturbed", Fate(), monkeypatch)
    fate = Fate(deaths={7: "before"})
    assert with_mortal_rank(tiny, tmp_path, fate, use, monkeypatch).state_hash == expected[-1].state_hash
    assert fate.calls[5:] == ["save", "saved", "publish", "restore", "publish", "committed"]


def test_a_death_while_recovering_is_recovered_from(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_script(tiny, tmp_path / "undisturbed", Fate(), monkeypatch)
    # the third step dies, then the restore of the checkpoint, then the adoption
    fate = Fate(deaths={12: "after", 13: "before", 15: "after"})
    assert run_script(tiny, tmp_path / "disturbed", fate, monkeypatch)[-1].state_hash == expected[-1].state_hash
    assert fate.calls[12:18] == ["step", "restore", "restore", "adopt", "restore", "adopt"]


def test_deltas_go_on_after_a_recovery_that_proves_its_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_script(tiny, tmp_path, Fate(deaths={12: "after"}), monkeypatch)
    assert [manifest.base for manifest in found] == [None, 0, 1, 2]


def test_a_published_version_older_than_the_checkpoint_is_followed_by_an_anchor(tiny: Path, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_script(tiny, tmp_path, Fate(deaths={10: "before"}), monkeypatch)
    assert [manifest.base for manifest in found] == [None, 0, None, 2]
    assert found[-1].run_epoch == 0


def test_a_recovery_that_is_not_bit_equal_begins_a_new_epoch_with_an_anchor(tiny: Path, tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_script(tiny, tmp_path, Fate(deaths={11: "after"}, disturbed=True), monkeypatch, checkpoint_every_steps=None)
    assert [(m.version, m.base, m.run_epoch) for m in found] == [(0, None, 0), (1, 0, 0), (2, 1, 0), (3, None, 1)]


def test_a_rank_that_keeps_dying_ends_the_run_with_the_reason(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fate = Fate(deaths=dict.fromkeys(range(2, 100), "before"))
    with pytest.raises(RunAborted, match=r"max_restarts = 2.*killed by signal 9"):
        run_script(tiny, tmp_path, fate, monkeypatch, max_restarts=2)
    assert fate.starts == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_beside_a_checkpoint_costs_that_checkpoint_and_no_step(when: str, tiny: Path, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(trainer: Trainer) -> int:
        await trainer.step(random_batch(0))
        await trainer.checkpoint()
        result = await trainer.step(random_batch(1, version=1))
        await trainer.settle()
        metrics = result.metrics.result()
        assert (metrics["train/restarts/sum"], metrics["train/lost_checkpoints/sum"]) == (1, 1)
        assert not list((tmp_path / "run" / "checkpoints").iterdir())
        await trainer.save(tmp_path / "saved")
        return (await trainer.publish()).state_hash

    undisturbed = run_script(tiny, tmp_path / "undisturbed", Fate(), monkeypatch)
    number = {"before": 2, "after": 3}[when]
    state_hash = with_mortal_rank(tiny, tmp_path, Fate(deaths={number: when}), use, monkeypatch, checkpoint_every_steps=1)
    assert state_hash == undisturbed[2].state_hash

"""Death at every operation, with ranks in the test's own process that die on demand."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.channel import Reply
from asyncrl.errors import ChildDied, RunAborted
from asyncrl.paths import RunPaths
from asyncrl.train.rank_group import InlineRank
from asyncrl.train.rank_spec import RankSpec
from asyncrl.train.trainer import Trainer
from asyncrl.weights.manifest import Manifest
from tests.train.train_data import random_batch, sequence


@dataclass
class Fate:
    """Which calls of the run kill the rank, counted from 0."""

    deaths: Mapping[int, str] = field(default_factory=dict)
    """By number of the call: "before" it is done, or "after", its answer lost."""
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

    async def call(self, op: str, body: Mapping[str, Any], *, arrays: Mapping[str, Any], timeout_s: float) -> list[Reply]:
        number = len(self._fate.calls)
        self._fate.calls.append(op)
        death = self._fate.deaths.get(number)
        if death == "before":
            raise ChildDied("killed by signal 9")
        replies = await super().call(op, body, arrays=arrays, timeout_s=timeout_s)
        if death == "after":
            raise ChildDied("killed by signal 9")
        return replies


def run_script(model: Path, folder: Path, fate: Fate, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[Manifest]:
    """Three steps, published, with a checkpoint after the second; the manifests."""
    monkeypatch.setattr("asyncrl.train.trainer.ChildRanks", fate)

    async def main() -> list[Manifest]:
        paths = RunPaths(root=folder / "run", shared=folder / "shared")
        paths.make()
        trainer = Trainer(model, correction="token_tis", learning_rate=1e-2, processes=1, **{"checkpoint_every_steps": 2, **settings})
        await trainer.start(paths)
        manifests = [await trainer.publish()]
        for version in range(3):
            result = await trainer.step(random_batch(version, version=version))
            assert result.version == version + 1
            await trainer.score([sequence([2, 3], [4])])
            manifests.append(await trainer.publish())
        await trainer.close()
        return manifests

    return asyncio.run(main())


UNDISTURBED = ["publish", "committed", "step", "score", "publish", "committed", "step", "save", "score", "publish", "committed",
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


def test_a_death_while_recovering_is_recovered_from(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_script(tiny, tmp_path / "undisturbed", Fate(), monkeypatch)
    # the third step dies, then the restore of the checkpoint, then the adoption
    fate = Fate(deaths={11: "after", 12: "before", 14: "after"})
    assert run_script(tiny, tmp_path / "disturbed", fate, monkeypatch)[-1].state_hash == expected[-1].state_hash
    assert fate.calls[11:17] == ["step", "restore", "restore", "adopt", "restore", "adopt"]


def test_deltas_go_on_after_a_recovery_that_proves_its_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_script(tiny, tmp_path, Fate(deaths={11: "after"}), monkeypatch)
    assert [manifest.base for manifest in found] == [None, 0, 1, 2]


def test_a_published_version_older_than_the_checkpoint_is_followed_by_an_anchor(tiny: Path, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_script(tiny, tmp_path, Fate(deaths={8: "before"}), monkeypatch)
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

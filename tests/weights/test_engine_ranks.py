"""An engine of several ranks, played by receivers that each hold a share of the rows."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import WeightSyncError, WrongBase, describe_error
from asyncrl.weights.dense_reload import DenseReload
from asyncrl.weights.engine_ranks import EngineRanks
from asyncrl.weights.rank_classes import Placement, TensorPlan
from asyncrl.weights.rank_sync import RankSync
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.routes import record_routes
from asyncrl.weights.vllm_plugin import WorkerExtension
from tests.weights.conftest import SHAPES

NOTHING = DenseReload(nn.Identity(), load=lambda tensors: None, shadows={})


class Share(nn.Module):
    """Rows 0 … 20 or 20 … 40 of one tensor, columns of another, and a norm of which both ranks have a copy."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.full((20, 7), 0.5, dtype=torch.bfloat16))
        self.up = nn.Parameter(torch.full((3, 3 - rank), 0.5, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.full((1,), 0.5, dtype=torch.bfloat16))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.data.copy_(tensor[20 * self.rank:20 * self.rank + 20])
            elif name == "up.weight":
                self.up.data.copy_(tensor[:, 3 * self.rank:3 * self.rank + 3])
            else:
                self.norm.data.copy_(tensor)

    def bits(self):
        return {name: value.detach().view(torch.int16).numpy().view("u2") for name, value in self.named_parameters()}


class Ranks:
    """Two ranks. `failing` maps (method, rank) to what it raises; with a `slow` event, set by the first look, no fetch ends."""

    def __init__(self, rig):
        self.models = [Share(rank) for rank in (0, 1)]
        meta = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in SHAPES.items()}
        routed = [record_routes(model, load=model.load_weights, tensors=meta, shard=True).routed for model in self.models]
        plan = TensorPlan.of_ranks([{name: placement(target) for name, target in targets.items()} for targets in routed], whole=[{}, {}])
        self.workers = [WorkerExtension(), WorkerExtension()]
        for rank, worker in enumerate(self.workers):
            receiver = Receiver(routed[rank], source=rig.store, classes=plan.classes[rank])
            worker.rank, worker.asyncrl_sync = rank, RankSync(receiver, reload=NOTHING)
        self.failing, self.asked, self.slow = {}, [], None
        self.engine = EngineRanks(self.ask)

    async def ask(self, method, arguments):
        self.asked.append(method)
        if self.slow and method == "asyncrl_fetched":
            self.slow.set()
            return [{"shares": None} for _ in self.workers]
        return [describe(self.failing[method, rank]) if (method, rank) in self.failing else getattr(worker, method)(*arguments)
                for rank, worker in enumerate(self.workers)]

    def apply(self, manifest):
        return run(self.engine.apply(manifest))

    def holds(self, rig):
        embed, up = rig.state["embed.weight"].reshape(40, 7), rig.state["up.weight"].reshape(3, 5)
        return all(np.array_equal(model.bits()["embed"], embed[20 * rank:20 * rank + 20])
                   and np.array_equal(model.bits()["up"], up[:, 3 * rank:3 * rank + 3])
                   and np.array_equal(model.bits()["norm"], rig.state["norm.weight"]) for rank, model in enumerate(self.models))

    def versions(self):
        return [worker.asyncrl_state()["version"] for worker in self.workers]


def placement(target):
    return Placement(target.dtype, target.shape, tuple((box.sizes, box.checkpoint) for box in target.boxes))


def describe(error):
    return {"error": describe_error(error)}


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def ranks(rig):
    return Ranks(rig)


def test_every_rank_writes_its_share_and_together_they_prove_the_state(rig, ranks):
    manifest = rig.publish(0, base=None)
    assert ranks.apply(manifest) == manifest.state_hash
    for version, density in enumerate((0.0, 0.02, 0.4, 1.0), start=1):
        rig.change(density)
        manifest = rig.publish(version, base=version - 1)
        assert ranks.apply(manifest) == manifest.state_hash
        assert ranks.holds(rig)
        for worker in ranks.workers:
            worker.asyncrl_sync.receiver.audit()
    assert (ranks.engine.version, ranks.engine.why_none) == (4, "")


def test_versions_missed_are_written_at_once(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    for version in (1, 2, 3):
        rig.change(0.3)
        manifest = rig.publish(version, base=version - 1)
    assert ranks.apply(manifest) == manifest.state_hash
    assert ranks.holds(rig)


def test_a_fetch_writes_nothing_and_is_not_repeated(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    before = [model.bits()["embed"].copy() for model in ranks.models]
    rig.change(1.0)
    manifest = rig.publish(1, base=0)
    run(ranks.engine.fetch(manifest))
    assert all(np.array_equal(one, model.bits()["embed"]) for one, model in zip(before, ranks.models, strict=True))
    asked = ranks.asked.count("asyncrl_fetch")
    assert ranks.apply(manifest) == manifest.state_hash
    assert ranks.asked.count("asyncrl_fetch") == asked
    assert ranks.holds(rig)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_fetch_leaves_all_as_they_were(rig, ranks, rank):
    ranks.apply(rig.publish(0, base=None))
    rig.change(0.5)
    manifest = rig.publish(1, base=0)
    ranks.failing["asyncrl_fetched", rank] = WrongBase("no chain")
    with pytest.raises(WrongBase, match="no chain"):
        ranks.apply(manifest)
    assert (ranks.versions(), ranks.engine.version) == ([0, 0], 0)
    ranks.failing.clear()
    assert ranks.apply(manifest) == manifest.state_hash


def test_a_manifest_for_another_state_is_refused_before_any_rank_writes(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    rig.change(0.5)
    manifest = rig.publish(1, base=0)
    with pytest.raises(WeightSyncError, match="would lead to state"):
        ranks.apply(dataclasses.replace(manifest, state_hash=manifest.state_hash ^ 1))
    assert (ranks.versions(), ranks.engine.version) == ([0, 0], 0)


def test_copies_that_differ_are_found_before_any_rank_writes(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    ranks.models[1].norm.data[0] = 3.0
    rig.state["norm.weight"] = rig.state["norm.weight"] ^ 1
    with pytest.raises(WeightSyncError, match="of which ranks 0,1 each have a copy differ"):
        ranks.apply(rig.publish(1, base=0))
    assert (ranks.versions(), ranks.engine.version) == ([0, 0], 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("written", [False, True])
def test_a_rank_that_does_not_write_to_the_end_poisons_all_until_an_anchor(rig, ranks, monkeypatch, rank, written):
    ranks.apply(rig.publish(0, base=None))
    rig.change(1.0)
    manifest = rig.publish(1, base=0)
    if written:
        calls, write = itertools.count(), RoutedTarget.write
        place = ranks.models[rank].embed.untyped_storage().data_ptr()

        def torn(target, entry, changes):
            if target.boxes[0].memory.data_ptr() == place and next(calls) == 0:
                raise MemoryError("torn")
            write(target, entry, changes)
        monkeypatch.setattr(RoutedTarget, "write", torn)
    else:
        ranks.failing["asyncrl_apply", rank] = WeightSyncError("it did not come to it")
    with pytest.raises(Exception, match=r"torn|did not come to it"):
        ranks.apply(manifest)
    assert (ranks.versions(), ranks.engine.version) == ([None, None], None)
    assert "did not" in ranks.engine.why_none
    assert all(worker.asyncrl_state()["poisoned"] for worker in ranks.workers)
    ranks.failing.clear()
    anchor = rig.anchor()
    assert ranks.apply(anchor) == manifest.state_hash
    assert ranks.holds(rig)
    assert (ranks.versions(), ranks.engine.version) == ([1, 1], 1)


def test_an_update_that_no_rank_began_to_write_leaves_the_version(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    rig.change(1.0)
    manifest = rig.publish(1, base=0)
    ranks.failing = {("asyncrl_apply", rank): WeightSyncError("not now") for rank in (0, 1)}
    with pytest.raises(WeightSyncError, match="not now"):
        ranks.apply(manifest)
    assert (ranks.versions(), ranks.engine.version, ranks.engine.why_none) == ([0, 0], 0, "")


def test_a_version_asked_for_while_another_is_fetched_takes_its_place(rig, ranks):
    ranks.apply(rig.publish(0, base=None))
    rig.change(0.5)
    first = rig.publish(1, base=0)
    rig.change(0.5)
    second = rig.publish(2, base=1)

    async def main():
        ranks.slow = asyncio.Event()
        replaced = asyncio.create_task(ranks.engine.fetch(first))
        await ranks.slow.wait()
        ranks.slow = None
        await ranks.engine.fetch(second)
        with pytest.raises(WeightSyncError, match="version 1 is not being fetched: version 2"):
            await replaced
        return await ranks.engine.apply(second)

    assert run(main()) == second.state_hash
    assert ranks.holds(rig)

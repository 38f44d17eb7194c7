from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights.base_proof import prove_base, saved_tensors
from asyncrl.weights.dense_reload import DenseReload
from asyncrl.weights.rank_classes import TensorPlan
from asyncrl.weights.rank_sync import RecordedModel
from asyncrl.weights.receiver import joined
from asyncrl.weights.routes import record_routes

SHAPES = {"embed.weight": (40, 7), "norm.weight": (1,), "up.weight": (3, 5)}


class Computing(nn.Module):
    """One tensor is copied; of the others the model holds what its loader computes: an exponential, and the half of a transpose."""

    def __init__(self, dtype=torch.float32, *, adds=False):
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(40, 7, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        self.up = nn.Parameter(torch.zeros(5, 3, dtype=dtype))
        self.adds, self.loaded, self.fails = adds, [], False

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded.append(name)
            if self.fails:
                raise RuntimeError("no room")
            if name == "embed.weight":
                self.embed.data.copy_(tensor)
            elif name == "norm.weight":
                self.norm.data.copy_(-torch.exp(tensor.float()) + (self.norm.data if self.adds else 0))
            else:
                self.up.data.copy_(tensor.t().contiguous())


def tensors(rig):
    return {piece.name: torch.from_numpy(rig.state[piece.name].view("i2").copy()).view(torch.bfloat16).reshape(piece.shape)
            for piece in rig.pieces}


def fresh(rig, dtype, **kwargs):
    model = Computing(dtype, **kwargs)
    model.load_weights(tensors(rig).items())
    return model


@pytest.fixture
def sane(rig):
    """A rig whose values are numbers of ordinary size."""
    rig.state = {name: (rig.rng.standard_normal(bits.size).astype("f4").view("u4") >> 16).astype("u2")
                 for name, bits in rig.state.items()}
    return rig


def folder_of(rig, path):
    path.mkdir(exist_ok=True)
    save_file(tensors(rig), path / "model.safetensors")
    return path


def synced(rig, model, folder):
    recorded = RecordedModel(model, load=model.load_weights, folder=folder, ranks=1)
    plan = TensorPlan.of_ranks([recorded.placements], whole=[recorded.whole])
    return recorded.bind(plan, rank=0, source=rig.store, adapters=None)


def same(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_with_its_weights_follows_every_version(sane, tmp_path, dtype):
    model = fresh(sane, dtype)
    sync = synced(sane, model, folder_of(sane, tmp_path / "base"))
    assert sync.elements == 280
    sync.apply(sane.publish(0, base=None))
    for version, density in enumerate((0.0, 0.05, 0.5, 1.0), start=1):
        sane.change(density)
        sane.state = {name: bits & 0xBFFF for name, bits in sane.state.items()}  # below 2 in size
        assert sync.apply(sane.publish(version, base=version - 1)) == joined([sync.receiver.audit()])
        assert same(model, fresh(sane, dtype))


def test_only_what_changed_is_loaded_again(sane, tmp_path):
    model = fresh(sane, torch.float32)
    sync = synced(sane, model, folder_of(sane, tmp_path / "base"))
    sync.apply(sane.publish(0, base=None))
    model.loaded.clear()
    sane.state["up.weight"] = sane.state["up.weight"] ^ 1
    sync.apply(sane.publish(1, base=0))
    assert model.loaded == ["up.weight"]
    sync.apply(sane.store.manifest(1))
    assert model.loaded == ["up.weight"]


def test_a_loader_whose_result_depends_on_what_was_there_is_refused(sane, tmp_path):
    folder = folder_of(sane, tmp_path / "base")
    model = fresh(sane, torch.float32, adds=True)
    with pytest.raises(WeightSyncError, match=r"loading norm\.weight again leaves norm other than it was"):
        DenseReload.of_folder(model, load=model.load_weights, names=["norm.weight"], folder=folder).prove()


def test_the_proof_leaves_the_model_as_it_was(sane, tmp_path):
    folder, model = folder_of(sane, tmp_path / "base"), fresh(sane, torch.bfloat16)
    synced(sane, model, folder)
    assert same(model, fresh(sane, torch.bfloat16))
    found = record_routes(model, load=model.load_weights, tensors=saved_tensors(folder))
    assert set(found.whole) == {"norm.weight", "up.weight"}
    assert prove_base(found.routed, folder=folder) == 280


def test_a_loader_that_fails_poisons_until_an_anchor(sane, tmp_path):
    model = fresh(sane, torch.float32)
    sync = synced(sane, model, folder_of(sane, tmp_path / "base"))
    sync.apply(sane.publish(0, base=None))
    sane.change(1.0)
    delta, model.fails = sane.publish(1, base=0), True
    with pytest.raises(WeightSyncError, match="the model's own loader failed on what has no route: RuntimeError: no room"):
        sync.apply(delta)
    assert (sync.receiver.version, "no room" in sync.receiver.poisoned) == (None, True)
    model.fails = False
    sync.apply(sane.anchor())
    assert same(model, fresh(sane, torch.float32))

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import memory_targets

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fsdp_publish.py")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    environment = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), "2", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, env=environment) for rank in (0, 1)]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=90)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    return {kind: StoreTransport(folder / kind / "weights") for kind in ("whole", "shard", "replicate")}


def received(store):
    manifest = store.manifest(1)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    targets = {entry.name: torch.zeros(entry.shape, dtype=dtypes[entry.dtype]) for entry in store.manifest(0).tensors}
    receiver = Receiver(memory_targets(targets), source=store)
    receiver.apply(manifest)
    receiver.audit()
    return targets


@pytest.mark.parametrize("kind", ["shard", "replicate"])
@pytest.mark.parametrize("version", [0, 1])
def test_two_ranks_publish_the_state_of_one(stores, kind, version):
    one, two = stores["whole"].manifest(version), stores[kind].manifest(version)
    assert two.state_hash == one.state_hash
    assert (two.density, two.base) == (one.density, one.base)


@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_what_two_ranks_publish_decodes_to_what_one_does(stores, kind):
    one, two = received(stores["whole"]), received(stores[kind])
    assert set(one) == {"embed.weight", "up.weight", "up.bias", "down.weight", "down.bias", "ignored", "scale", "steps"}
    assert one["steps"].item() == 4
    assert {name: tensor.tolist() for name, tensor in one.items()} == {name: tensor.tolist() for name, tensor in two.items()}


def test_each_rank_publishes_its_own_rows_and_replicas_once(stores):
    pieces = {rank: {(entry.name, entry.start, entry.length) for entry in stores["shard"].manifest(0).tensors if entry.part == rank}
              for rank in (0, 1)}
    assert pieces[0] == {("embed.weight", 0, 24), ("up.weight", 0, 16), ("up.bias", 0, 4), ("down.weight", 0, 7), ("down.bias", 0, 1),
                         ("ignored", 0, 6), ("scale", 0, 5), ("steps", 0, 1)}
    assert pieces[1] == {("embed.weight", 24, 20), ("up.weight", 16, 12), ("up.bias", 4, 3)}
    assert len(stores["replicate"].manifest(0).parts) == 1

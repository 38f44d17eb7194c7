import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import bits_of, memory_targets

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fsdp_publish.py")


LAST = 3
KINDS = [(2, "shard"), (2, "replicate"), (1, "shard"), (3, "shard"), (3, "replicate")]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """By number of ranks and kind; ("whole") without FSDP."""
    found = {}
    for world in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"fsdp{world}")
        run_ranks(world, folder)
        found |= {(world, kind): StoreTransport(folder / kind / "weights") for kind in ("whole", "shard", "replicate")}
    return found


def run_ranks(world, folder):
    environment = {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(world), str(folder)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env=environment) for rank in range(world)]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=90)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def received(store):
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    targets = {entry.name: torch.zeros(entry.shape, dtype=dtypes[entry.dtype]) for entry in store.manifest(0).tensors}
    receiver = Receiver(memory_targets(targets), source=store)
    receiver.apply(store.manifest(LAST))
    receiver.audit()
    return targets


@pytest.mark.parametrize(("world", "kind"), KINDS)
@pytest.mark.parametrize("version", range(LAST + 1))
def test_any_number_of_ranks_publishes_the_state_of_one(stores, world, kind, version):
    one, several = stores[1, "whole"].manifest(version), stores[world, kind].manifest(version)
    assert several.state_hash == one.state_hash
    assert (several.density, several.base) == (one.density, one.base)


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_what_several_ranks_publish_is_the_same_bytes_of_state(stores, world, kind):
    one, several = received(stores[1, "whole"]), received(stores[world, kind])
    assert set(one) == {"embed.weight", "up.weight", "up.bias", "down.weight", "down.bias", "ignored", "scale", "steps"}
    assert one["steps"].item() == 3 + LAST
    assert {name: bits_of(tensor).tobytes() for name, tensor in one.items()} == {
        name: bits_of(tensor).tobytes() for name, tensor in several.items()}


def test_each_rank_publishes_its_own_rows_and_replicas_once(stores):
    pieces = {rank: {(entry.name, entry.start, entry.length) for entry in stores[2, "shard"].manifest(0).tensors if entry.part == rank}
              for rank in (0, 1)}
    assert pieces[0] == {("embed.weight", 0, 24), ("up.weight", 0, 16), ("up.bias", 0, 4), ("down.weight", 0, 7), ("down.bias", 0, 1),
                         ("ignored", 0, 6), ("scale", 0, 5), ("steps", 0, 1)}
    assert pieces[1] == {("embed.weight", 24, 20), ("up.weight", 16, 12), ("up.bias", 4, 3)}
    assert len(stores[2, "replicate"].manifest(0).parts) == 1


def test_a_rank_without_a_row_of_a_tensor_publishes_the_others(stores):
    rows = {entry.name: entry.length for entry in stores[3, "shard"].manifest(0).tensors if entry.part == 2}
    assert rows == {"embed.weight": 3 * 4, "up.weight": 1 * 4, "up.bias": 1}

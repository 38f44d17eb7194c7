"""Deltas that are lost, damaged, repeated or out of order: whatever arrives, a receiver holds a published version or refuses."""

import contextlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.torch_pieces import memory_targets

mishaps = st.lists(st.tuples(st.sampled_from(["none", "none", "drop", "catch_up", "duplicate", "old", "truncate", "flip", "no_manifest",
                                              "anchor"]), st.floats(0, 1), st.integers(0, 2**16)), min_size=50, max_size=50)


@settings(max_examples=20, deadline=None)
@given(mishaps, st.integers(0, 2**16), st.sampled_from([torch.bfloat16, torch.float32]))
def test_over_fifty_versions_of_mishaps_a_receiver_is_right_or_refuses(make_rig, mishaps, seed, dtype):
    rig = make_rig(seed=seed)
    targets = rig.targets(dtype)
    receiver = Receiver(memory_targets(targets), source=rig.store)
    manifests = [rig.publish(0, base=None)]
    states = [dict(rig.state)]
    receiver.apply(manifests[0])
    for version, (mishap, density, where) in enumerate(mishaps, 1):
        rig.change(density)
        manifests.append(rig.publish(version, base=version - 1))
        states.append(dict(rig.state))
        with contextlib.suppress(WeightSyncError):
            deliver(rig, receiver, manifests, mishap=mishap, where=where)
        rig.state = states[receiver.version]
        assert rig.holds(targets)
        assert joined([receiver.audit()]) == manifests[receiver.version].state_hash
        rig.state = states[version]
    receiver.apply(rig.anchor())
    assert receiver.version == 50
    assert rig.holds(targets)


def deliver(rig, receiver, manifests, *, mishap, where):
    newest = manifests[-1]
    folder = rig.root / f"v{newest.version:06d}"
    path = rig.root / newest.parts[0].path
    content = path.read_bytes()
    if mishap == "drop":
        return
    if mishap == "truncate":
        path.write_bytes(content[:where % (len(content) + 1)])
    elif mishap == "flip" and content:
        place = where % len(content)
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << where % 8)]) + content[place + 1:])
    elif mishap == "no_manifest":
        (folder / "delta.json").unlink()
    elif mishap == "old":
        receiver.apply(manifests[where % len(manifests)])
    elif mishap == "anchor":
        receiver.apply(rig.anchor())
    elif mishap == "catch_up":
        receiver.apply(newest)
    receiver.apply(newest)
    if mishap == "duplicate":
        receiver.apply(newest)

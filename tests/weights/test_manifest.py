"""What passes for a manifest: the text of one, and nothing that is like it."""

import json

import pytest
import torch
import xxhash

from asyncrl.errors import WeightSyncError
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.torch_pieces import memory_targets

WRONG = ["x", 1.0, float("nan"), float("inf"), True, [], ["x"], {}, None]


def fields(raw):
    """Places of all fields of a manifest: of itself, a part, and an entry."""
    return [*((raw, name) for name in raw), *((raw["parts"][0], name) for name in raw["parts"][0]),
            *((raw["tensors"][0], name) for name in raw["tensors"][0])]


def test_a_field_of_another_type_is_refused_by_name(rig):
    text = rig.publish(0, base=None).to_json()
    assert Manifest.from_json(text).to_json() == text
    for number in range(len(fields(json.loads(text)))):
        for wrong in WRONG:
            raw = json.loads(text)
            place, name = fields(raw)[number]
            allowed = {"base": (None,), "packed": (None,), "parts": ([],), "tensors": ([],), "shape": ([],),
                       **dict.fromkeys(("name", "dtype", "path", "xxh3"), ("x",))}.get(name, ())
            if any(wrong == value and type(wrong) is type(value) for value in allowed):
                continue
            place[name] = wrong
            with pytest.raises(ValueError, match=name):
                Manifest.from_json(json.dumps(raw))


def test_a_field_that_is_missing_or_unknown_is_refused_by_name(rig):
    text = rig.publish(0, base=None).to_json()
    for number in range(len(fields(json.loads(text)))):
        raw = json.loads(text)
        place, name = fields(raw)[number]
        place[f"{name}_of_tomorrow"] = place.pop(name)
        with pytest.raises(ValueError, match=name):
            Manifest.from_json(json.dumps(raw))


@pytest.mark.parametrize("content", ["[" * 200_000, "null", "[]", "1", "{}", '{"manifest": {}, "xxh3": []}', "\ud800"])
def test_what_is_no_manifest_at_all_is_damaged(rig, content):
    rig.publish(0, base=None)
    (rig.root / "v000000" / "anchor.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(WeightSyncError, match="version 0 is damaged"):
        rig.store.manifest(0)


def test_one_with_a_true_checksum_and_a_wrong_type_stops_neither_reader_nor_retention(rig):
    raw = json.loads(rig.publish(0, base=None).to_json())
    rig.change()
    newest = rig.publish(1, base=0)
    raw["parts"][0]["bytes"] = "many"
    text = json.dumps(raw, sort_keys=True)
    path = rig.root / "v000000" / "anchor.json"
    path.write_text(json.dumps({"manifest": raw, "xxh3": xxhash.xxh3_128_hexdigest(text.encode())}, sort_keys=True))
    with pytest.raises(WeightSyncError, match=r"version 0 is damaged: parts\.0\.bytes"):
        rig.store.manifest(0)
    rig.store.retain(1)
    assert rig.store.manifest(1) == newest


def test_a_tensor_without_elements_is_in_no_manifest_and_is_audited(rig):
    targets = rig.targets()
    receiver = Receiver(memory_targets({**targets, "empty": torch.zeros(0, 4, dtype=torch.bfloat16)}), source=rig.store)
    receiver.apply(rig.publish(0, base=None))
    rig.change()
    newest = rig.publish(1, base=0)
    assert receiver.apply(newest) == joined([receiver.audit()])
    assert rig.holds(targets)

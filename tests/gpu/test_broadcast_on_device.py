"""Versions that are pushed between GPUs, by NCCL: what tests/weights/test_broadcast.py shows of gloo."""

import signal

import pytest
import torch

from tests.weights.broadcast_member import SLICE, BroadcastMember
from tests.weights.test_broadcast import digests, manifest_of, start_delivery

pytestmark = [pytest.mark.gpu, pytest.mark.slow,
              pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs: NCCL takes one a member")]


@pytest.fixture
def members(tmp_path):
    started = [BroadcastMember(tmp_path, name, ranks=1, device=f"cuda:{gpu}", timeout_s=60)
               for gpu, name in enumerate(("trainer-0", "engine-0", "engine-1"))]
    for member in started:
        assert member.answer() == {"ready": True}
    yield started
    for member in started:
        member.end()


def test_every_engine_gets_every_part_and_another_group_is_made_without_one_that_is_killed(members):
    rank, *engines = members
    manifest = manifest_of([rank], 0, sizes=[2 * SLICE + 5, 10])
    start_delivery([rank], engines, manifest)
    answers = [member.answer() for member in (*engines, rank)]
    assert [answer.get("digests") for answer in answers] == [digests(manifest)] * 2 + [None]
    assert [answer["trace"] for answer in answers] == [[[0, SLICE], [0, SLICE], [0, 5], [0, 10]]] * 3
    manifest = manifest_of([rank], 1, sizes=[4 * SLICE], base=0)
    start_delivery([rank], engines, manifest, **{"engine-1": {"stop_at": 2}})
    assert engines[1].answer() == {"at": 2}
    engines[1].process.send_signal(signal.SIGKILL)
    assert engines[0].answer()["digests"] == digests(manifest)
    assert rank.answer()["said"].startswith("version 1 was delivered without engine-1.0 (")

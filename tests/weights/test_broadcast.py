"""Members are real processes that meet over gloo; none of these tests goes by time, except that a time-out ends."""

import dataclasses
import signal

import numpy as np
import pytest

from asyncrl.weights.broadcast import slices
from asyncrl.weights.manifest import Manifest, Part
from tests.weights.broadcast_member import SLICE, BroadcastMember, payload

pytestmark = pytest.mark.slow


@pytest.fixture
def members(tmp_path):
    started = []

    def start(*names, **settings):
        new = [BroadcastMember(tmp_path, name, **settings) for name in names]
        started.extend(new)
        for member in new:
            assert member.answer() == {"ready": True}
        return new

    yield start
    for member in started:
        member.end()


def manifest_of(ranks, version, *, sizes, base=None):
    """A version of which every rank has put parts of these sizes."""
    parts = [Part(*part) for number, rank in enumerate(ranks)
             for part in rank.ask(put=version, parts=[[100 * version + 10 * number + bucket, size]
                                                      for bucket, size in enumerate(sizes)])["parts"]]
    return Manifest(run_epoch=0, version=version, base=base, parts=tuple(parts), tensors=(), state_hash=version)


def start_delivery(ranks, engines, manifest, *, asked=None, **told):
    for engine in engines:
        engine.tell(parts=manifest.to_json(), held=None if manifest.base is None else (0, manifest.base), **told.get(engine.name, {}))
    for rank in ranks:
        rank.tell(deliver=manifest.to_json(), engines=asked or sorted({engine.name.partition("/")[0] for engine in engines}),
                  **told.get(rank.name, {}))


def digests(manifest):
    return [part.xxh3 for part in manifest.parts]


def test_every_worker_gets_every_part_and_all_members_run_the_same_collectives(members):
    ranks, engines = members("trainer-0", "trainer-1"), members("engine-0", "engine-1/0", "engine-1/1")
    manifest = manifest_of(ranks, 0, sizes=[2 * SLICE + 5, 0, 10])
    start_delivery(ranks, engines, manifest)
    answers = [member.answer() for member in (*engines, *ranks)]
    assert [answer.get("digests") for answer in answers] == [digests(manifest)] * 3 + [None] * 2
    in_order = [[root, size] for root in (0, 1) for size in (SLICE, SLICE, 5, 10)]
    assert [answer["trace"] for answer in answers] == [in_order] * 5


def test_the_order_of_collectives_is_that_of_the_manifest_whichever_member_is_slow(members):
    ranks, engines = members("trainer-0", "trainer-1"), members("engine-0", "engine-1")
    traces = []
    for version, slow in enumerate((ranks[0], ranks[1], engines[1])):
        manifest = manifest_of(ranks, version, sizes=[SLICE + 1, 4], base=version - 1 if version else None)
        start_delivery(ranks, engines, manifest, **{slow.name: {"stop_at": 2}})
        assert slow.answer() == {"at": 2}  # the others are in the collectives up to it, or past them
        slow.tell(go=True)
        traces += [member.answer()["trace"] for member in (*ranks, *engines)]
    assert traces == [[[0, SLICE], [0, 1], [0, 4], [1, SLICE], [1, 1], [1, 4]]] * 12


def test_a_group_stays_while_its_members_do_and_another_is_made_when_one_joins_or_leaves(members):
    ranks, first = members("trainer-0", ranks=1), members("engine-0")
    groups = []

    def deliver(version, engines):
        manifest = manifest_of(ranks, version, sizes=[50])
        start_delivery(ranks, engines, manifest)
        answers = [member.answer() for member in (*engines, *ranks)]
        assert [answer["digests"] for answer in answers[:-1]] == [digests(manifest)] * len(engines)
        assert len({answer["group"] for answer in answers}) == 1
        groups.append(answers[0]["group"])

    deliver(0, first)
    deliver(1, first)
    both = first + members("engine-1", ranks=1)
    deliver(2, both)
    deliver(3, both)
    both[0].end()
    deliver(4, both[1:])
    again = members("engine-1x", ranks=1)
    deliver(5, both[1:] + again)
    assert groups[0] == groups[1] != groups[2] == groups[3] != groups[4] != groups[5]
    assert len(set(groups)) == 4


def delivered(ranks, engines, version):
    """A delivery to all of them, which all have afterwards."""
    manifest = manifest_of(ranks, version, sizes=[SLICE + 1])
    start_delivery(ranks, engines, manifest)
    answers = [member.answer() for member in (*engines, *ranks)]
    return [answer.get("digests") for answer in answers] == [digests(manifest)] * len(engines) + [None] * len(ranks) and not any(
        "error" in answer for answer in answers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_killed_within_a_delivery_is_named_and_the_others_have_the_version(members, ranks):
    ranks = members(*(f"trainer-{rank}" for rank in range(ranks)), ranks=ranks)
    engines = members("engine-0", "engine-1", "engine-2")
    manifest = manifest_of(ranks, 0, sizes=[4 * SLICE])
    start_delivery(ranks, engines, manifest, **{"engine-1": {"stop_at": 2}})
    assert engines[1].answer() == {"at": 2}
    engines[1].process.send_signal(signal.SIGKILL)
    assert [engine.answer()["digests"] for engine in (engines[0], engines[2])] == [digests(manifest)] * 2
    said = ranks[0].answer()
    assert "error" not in said
    assert said["said"].startswith("version 0 was delivered without engine-1.0 (")
    assert all("error" not in rank.answer() for rank in ranks[1:])
    assert delivered(ranks, [engines[0], engines[2]], 1)


def test_an_engine_that_hangs_within_a_delivery_costs_the_others_no_more_than_the_time_out_allows(members):
    ranks, engines = members("trainer-0", ranks=1, timeout_s=3), members("engine-0", "engine-1", timeout_s=3)
    manifest = manifest_of(ranks, 0, sizes=[4 * SLICE])
    start_delivery(ranks, engines, manifest, **{"engine-1": {"stop_at": 2}})
    assert engines[1].answer() == {"at": 2}
    engines[1].process.send_signal(signal.SIGSTOP)
    assert engines[0].answer()["digests"] == digests(manifest)
    assert "engine-1.0 (said nothing for 3 s)" in ranks[0].answer()["said"]
    assert delivered(ranks, engines[:1], 1)
    engines[1].process.send_signal(signal.SIGCONT)
    engines[1].tell(go=True)
    assert engines[1].answer()["error"].startswith("WeightSyncError: ")  # and no longer waits for anybody
    assert delivered(ranks, engines, 2)


def test_an_engine_that_died_before_a_delivery_is_not_waited_for_and_one_that_does_not_come_is_for_the_time_out(members):
    ranks, engines = members("trainer-0", ranks=1, timeout_s=3), members("engine-0", "engine-1", "engine-2", timeout_s=3)
    engines[2].end()
    manifest = manifest_of(ranks, 0, sizes=[SLICE])
    start_delivery(ranks, engines[:1], manifest, asked=["engine-0", "engine-1", "engine-2"])
    assert engines[0].answer()["digests"] == digests(manifest)
    assert ranks[0].answer()["said"] == ("version 0 was delivered without engine-1 (did not come within 3 s), "
                                         "engine-2 (its process has ended)\n")


def test_without_any_engine_a_delivery_fails_naming_them_and_the_next_works(members):
    ranks, engines = members("trainer-0", "trainer-1", timeout_s=3), members("engine-0", timeout_s=3)
    manifest = manifest_of(ranks, 0, sizes=[SLICE])
    start_delivery(ranks, [], manifest, asked=["engine-0"])
    error = "WeightSyncError: version 0 reached no engine: engine-0 (did not come within 3 s)"
    assert [rank.answer()["error"] for rank in ranks] == [error, error]
    assert delivered(ranks, engines, 1)


def test_a_trainer_rank_that_dies_within_a_delivery_is_named_to_every_engine(members):
    ranks, engines = members("trainer-0", "trainer-1", timeout_s=5), members("engine-0", "engine-1", timeout_s=5)
    manifest = manifest_of(ranks, 0, sizes=[4 * SLICE])
    start_delivery(ranks, engines, manifest, **{"trainer-1": {"stop_at": 2}})
    assert ranks[1].answer() == {"at": 2}
    ranks[1].process.send_signal(signal.SIGKILL)
    for member in (ranks[0], *engines):
        assert "trainer-1 (its process has ended)" in member.answer()["error"]


def test_without_rank_0_an_engine_says_so(members):
    ranks, engines = members("trainer-0", ranks=1), members("engine-0")
    manifest = manifest_of(ranks, 0, sizes=[SLICE])
    engines[0].tell(parts=manifest.to_json(), stop_at=0)
    ranks[0].tell(deliver=manifest.to_json(), engines=["engine-0"])
    assert engines[0].answer() == {"at": 0}
    ranks[0].end()
    engines[0].tell(go=True)
    assert "trainer-0, which leads the delivery of version 0, is missing" in engines[0].answer()["error"]
    assert "trainer-0 is missing, which leads the delivery" in engines[0].ask(parts=manifest.to_json())["error"]


def test_an_engine_of_which_one_worker_dies_is_left_out_whole(members):
    ranks, engines = members("trainer-0", ranks=1, timeout_s=5), members("engine-0", "engine-1/0", "engine-1/1", timeout_s=5)
    manifest = manifest_of(ranks, 0, sizes=[4 * SLICE])
    start_delivery(ranks, engines, manifest, **{"engine-1/1": {"stop_at": 1}, "engine-1/0": {"stop_at": 1}})
    assert [engine.answer() for engine in engines[1:]] == [{"at": 1}, {"at": 1}]
    engines[2].process.send_signal(signal.SIGKILL)
    engines[1].tell(go=True)
    assert engines[0].answer()["digests"] == digests(manifest)
    assert "version 0 is delivered without this engine: engine-1.1 (" in engines[1].answer()["error"]


def test_a_delta_is_taken_on_its_base_alone(members):
    ranks, engines = members("trainer-0", ranks=1), members("engine-0")
    manifest = manifest_of(ranks, 3, sizes=[SLICE], base=2)
    for held in (None, (0, 1), (1, 2)):
        assert engines[0].ask(parts=manifest.to_json(), held=held)["error"].startswith("WrongBase: version 3 is a delta on version 2")
    start_delivery(ranks, engines, manifest)
    assert engines[0].answer()["digests"] == digests(manifest)


def test_parts_that_were_delivered_or_are_of_an_older_version_are_kept_no_longer(members):
    ranks, engines = members("trainer-0", ranks=1), members("engine-0")
    first, second = manifest_of(ranks, 0, sizes=[SLICE]), manifest_of(ranks, 1, sizes=[SLICE], base=0)
    outcomes = []
    for manifest in (first, second, second):
        start_delivery(ranks, engines, manifest)
        outcomes.append(["no rank keeps v00000" in member.answer().get("error", "") for member in (*engines, *ranks)])
    assert outcomes == [[True, True], [False, False], [True, True]]


def test_a_part_that_arrives_changed_is_refused(members):
    ranks, engines = members("trainer-0", ranks=1), members("engine-0")
    manifest = manifest_of(ranks, 0, sizes=[SLICE])
    changed = dataclasses.replace(manifest, parts=(dataclasses.replace(manifest.parts[0], xxh3="0" * 32),))
    start_delivery(ranks, engines, changed)
    assert "is damaged: its xxh3-128 is not 000" in engines[0].answer()["error"]
    assert "error" not in ranks[0].answer()


def test_all_bytes_are_sent_whatever_chunks_they_were_kept_in():
    data = payload(3, 2500)
    for cuts in ([], [1], [1000], [7, 999, 1000, 2400], [1000, 2000]):
        chunks = [bytes(chunk) for chunk in np.split(data, cuts)]
        sent = [bytes(piece) for piece in slices(chunks, size=1000)]
        assert [len(piece) for piece in sent] == [1000, 1000, 500]
        assert b"".join(sent) == bytes(data)
    assert list(slices([b"", b""], size=1000)) == []

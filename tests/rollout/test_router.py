"""The router: who serves what, and the weight update as one transaction over all engines."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from asyncrl.clock import now_s, run_virtual
from asyncrl.errors import ChildDied, ConfigError, RunAborted
from asyncrl.rollout.engine import Ack, GenerationRequest, Interruption
from asyncrl.rollout.fake_engine import FakeEngine, Faults, fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.types import Sampling, Status
from asyncrl.weights.config import WeightsConfig
from tests.rollout.rollout_fakes import requests_of, router_of

KEEP = Interruption.KEEP


def request(max_new_tokens: int = 3, *, name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, np.asarray([1, 2], np.int32), Sampling(max_new_tokens=max_new_tokens), seed=0)


async def consume(router: Router, max_new_tokens: int = 3, *, name: str = "r") -> list[Status | None]:
    """The finishes of a request's chunks."""
    return [chunk.finish async for chunk in router.generate(request(max_new_tokens, name=name))]


class ForgetfulEngine(FakeEngine):
    """Acknowledges the version it had before."""

    async def apply(self, manifest) -> Ack:
        return dataclasses.replace(await super().apply(manifest), version=manifest.version - 1)


def test_an_engine_serves_nothing_before_it_has_acknowledged_a_version():
    async def main():
        engine = FakeEngine()
        router = Router([engine])
        assert router.serving == ()
        with pytest.raises(RunAborted, match="none has acknowledged a version"):
            await consume(router)
        assert requests_of(engine) == []
        await router.update(fake_manifest(7), KEEP)
        assert router.serving == ("fake",)
        assert await consume(router) == [Status.LENGTH]
    run_virtual(main())


def test_an_update_pauses_applies_and_resumes_every_engine():
    async def main():
        engines = FakeEngine(name="a"), FakeEngine(name="b")
        router = Router(engines)
        update = await router.update(fake_manifest(0), Interruption.RECOMPUTE)
        for engine in engines:
            assert [name for name, _ in engine.calls] == ["pause", "apply", "resume"]
            assert engine.calls[0][1] is Interruption.RECOMPUTE
        assert {name: (ack.version, ack.state_hash) for name, ack in update.acks.items()} == {"a": (0, 1000), "b": (0, 1000)}
        assert update.failed == {}
    run_virtual(main())


def test_an_engine_that_fails_an_update_is_fenced_and_the_other_goes_on():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        a.faults = Faults(apply_error="checksum of part 3 differs")
        update = await router.update(fake_manifest(1, base=0), KEEP)
        assert list(update.acks) == ["b"]
        assert update.failed == {"a": "WeightSyncError: checksum of part 3 differs"}
        assert router.serving == ("b",)
        assert (a.version, b.version) == (0, 1)
        assert a.calls[-1][0] == "apply", "a failed apply is not resumed from"
        for _ in range(3):
            assert await consume(router) == [Status.LENGTH]
        assert (len(requests_of(a)), len(requests_of(b))) == (0, 3)
        a_calls = len(a.calls)
        update = await router.update(fake_manifest(2, base=1), KEEP)
        assert (list(update.acks), update.failed, len(a.calls)) == (["b"], {}, a_calls)
    run_virtual(main())


def test_requests_of_a_fenced_engine_end_with_its_death():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        running = asyncio.create_task(consume(router, 50))
        await asyncio.sleep(1.5)
        a.faults = Faults(apply_error="disk full")
        await router.update(fake_manifest(1, base=0), KEEP)
        with pytest.raises(ChildDied):
            await running
        assert router.running == 0
    run_virtual(main())


def test_a_wrong_state_hash_fences_the_engine_and_names_both_hashes():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        b.faults = Faults(wrong_hash=True)
        update = await router.update(fake_manifest(1, base=0), KEEP)
        assert update.failed["b"].startswith("WeightSyncError: b acknowledged version 1 with state hash 0x3ea")
        assert "published: version 1, 0x3e9" in update.failed["b"]
        assert router.serving == ("a",)
    run_virtual(main())


def test_an_acknowledgement_of_another_version_fences_the_engine():
    async def main():
        router = Router([FakeEngine(name="a"), ForgetfulEngine(name="b")])
        update = await router.update(fake_manifest(5), KEEP)
        assert "b acknowledged version 4" in update.failed["b"]
    run_virtual(main())


def test_a_delta_on_another_base_fences_the_engine():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        b.version = 1
        update = await router.update(fake_manifest(1, base=0), KEEP)
        assert update.failed == {"b": "WrongBase: engine b holds version 1, the delta needs 0"}
    run_virtual(main())


@pytest.mark.parametrize(("kind", "limit_s"), [(KEEP, 5.0), (Interruption.DRAIN, 40.0)])
def test_an_engine_that_does_not_pause_in_time_is_fenced(kind, limit_s):
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = Router([a, b], config=WeightsConfig(interruption="drain", apply_timeout_s=5.0, drain_timeout_s=40.0))
        await router.update(fake_manifest(0), KEEP)
        a.faults = Faults(pause_s=1000.0)
        update = await router.update(fake_manifest(1, base=0), kind)
        assert update.failed == {"a": f"pause did not return within {limit_s:g} s"}
        assert update.seconds == limit_s
        assert router.serving == ("b",)
    run_virtual(main())


def test_an_engine_that_goes_on_sampling_under_a_pause_is_fenced():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        a.faults = Faults(abort_ignored=True)
        update = await router.update(fake_manifest(1, base=0), KEEP)
        assert update.failed["a"].startswith("AbortNotHonoured")
    run_virtual(main())


def test_the_run_ends_with_every_reason_when_no_engine_is_left():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        a.faults, b.faults = Faults(apply_error="checksum differs"), Faults(wrong_hash=True)
        with pytest.raises(RunAborted, match=r"no engine serves.*checksum differs.*state hash"):
            await router.update(fake_manifest(1, base=0), KEEP)
        with pytest.raises(RunAborted, match=r"no engine serves.*checksum differs"):
            await consume(router)
    run_virtual(main())


def test_the_last_engine_is_not_closed_under_its_requests_before_the_reason_is_told():
    async def main():
        engine = FakeEngine(name="a")
        router = await router_of(engine)
        engine.faults = Faults(apply_error="checksum differs")
        with pytest.raises(RunAborted, match="checksum differs"):
            await router.update(fake_manifest(1, base=0), KEEP)
        assert ("close", None) not in engine.calls
    run_virtual(main())


def test_an_engine_that_dies_between_updates_takes_part_in_none():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        running = asyncio.create_task(consume(router, 9))
        await asyncio.sleep(1.5)
        a.die("killed by signal 9")
        with pytest.raises(ChildDied):
            await running
        assert (router.serving, router.unfenced) == (("b",), ("b",))
        assert router.reasons == {"a": "engine a is gone: killed by signal 9"}
        assert not router.answers("a")
        update = await router.update(fake_manifest(1, base=0), KEEP)
        assert (list(update.acks), update.failed) == (["b"], {})
    run_virtual(main())


def test_an_engine_that_dies_after_its_acknowledgement_does_not_serve_again():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        running = asyncio.create_task(consume(router, 50))
        await asyncio.sleep(1.5)
        b.faults = Faults(pause_s=10.0)
        updating = asyncio.create_task(router.update(fake_manifest(1, base=0), KEEP))
        await asyncio.sleep(5.0)  # a holds the new version, b still pauses
        a.die()
        with pytest.raises(ChildDied):
            await running
        update = await updating
        assert (list(update.acks), list(update.failed), router.serving) == (["b"], ["a"], ("b",))
    run_virtual(main())


def test_a_request_goes_to_the_least_loaded_engine():
    async def main():
        a, b = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(a, b)
        tasks = [asyncio.create_task(consume(router, tokens, name=name)) for name, tokens in (("1", 9), ("2", 2), ("3", 9), ("4", 2))]
        await asyncio.sleep(0.5)
        assert [[r.request_id for r in requests_of(engine)] for engine in (a, b)] == [["1", "3"], ["2", "4"]]
        await asyncio.sleep(3.0)  # b has finished both
        tasks += [asyncio.create_task(consume(router, 2, name=name)) for name in ("5", "6", "7")]
        await asyncio.sleep(0.1)
        assert [r.request_id for r in requests_of(b)] == ["2", "4", "5", "6"]
        assert [r.request_id for r in requests_of(a)] == ["1", "3", "7"]
        assert router.running == 5
        await asyncio.gather(*tasks)
        assert router.running == 0
    run_virtual(main())


def test_busy_seconds_are_those_with_a_request_somewhere_counted_once():
    async def main():
        router = await router_of(FakeEngine(name="a"), FakeEngine(name="b"))
        assert router.busy_s() == 0
        tasks = [asyncio.create_task(consume(router, 3))]      # 0 to 3
        await asyncio.sleep(1)
        tasks.append(asyncio.create_task(consume(router, 4)))  # 1 to 5
        await asyncio.sleep(1)
        assert router.busy_s() == 2
        await asyncio.sleep(6)                                 # idle from 5 to 8
        assert router.busy_s() == 5
        tasks.append(asyncio.create_task(consume(router, 2)))  # 8 to 10
        await asyncio.gather(*tasks)
        assert (now_s(), router.busy_s()) == (10, 7)
    run_virtual(main())


def test_keeping_updates_interrupt_none_of_sixteen_requests():
    async def main():
        engine = FakeEngine()
        router = await router_of(engine)
        tasks = [asyncio.create_task(consume(router, 6, name=str(number))) for number in range(16)]
        for version in (1, 2):
            await asyncio.sleep(2.5)
            await router.update(fake_manifest(version, base=version - 1), KEEP)
        finishes = await asyncio.gather(*tasks)
        assert [finish[-1] for finish in finishes] == [Status.LENGTH] * 16
        assert not any(status is Status.INTERRUPTED for finish in finishes for status in finish)
        assert len(requests_of(engine)) == 16
        assert not [call for call in engine.calls if call[0] == "cancel"]
    run_virtual(main())


def test_a_draining_update_waits_for_running_requests_and_new_ones_wait_for_it():
    async def main():
        router = await router_of(FakeEngine())
        first = asyncio.create_task(consume(router, 4))  # to 4
        await asyncio.sleep(1.5)
        updating = asyncio.create_task(router.update(fake_manifest(1, base=0), Interruption.DRAIN))
        await asyncio.sleep(0.5)
        second = [chunk async for chunk in router.generate(request(2))]
        assert first.done()
        assert (await updating).seconds == 2.5
        assert [chunk.policy_version for chunk in second] == [1]
        assert now_s() == 6
    run_virtual(main())


def test_engines_sleep_after_what_they_run_and_wake_with_the_next_update():
    async def main():
        engines = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(*engines)
        running = asyncio.create_task(consume(router, 4))  # to 4
        await asyncio.sleep(1.5)
        slept = await router.sleep()
        assert now_s() == 4
        assert {name: one.freed_bytes for name, one in slept.items()} == {"a": 1000, "b": 1000}
        assert await running == [Status.LENGTH]
        waiting = asyncio.create_task(consume(router, 1))
        await asyncio.sleep(5)
        assert not waiting.done()
        for version, woken in ((1, True), (2, False)):
            update = await router.update(fake_manifest(version), KEEP)
            assert (set(update.acks), update.woken) == ({"a", "b"}, woken)
        assert await waiting == [Status.LENGTH]
        for engine in engines:
            calls = [name for name, _ in engine.calls if name not in ("generate", "start")]
            assert calls[-8:] == ["pause", "sleep", "wake", "apply", "resume", "pause", "apply", "resume"]
    run_virtual(main())


@pytest.mark.parametrize("fault", ["dies", "does not sleep", "does not wake", "wakes to other weights"])
def test_an_engine_that_fails_asleep_is_fenced_and_never_serves_again(fault: str):
    async def main():
        engine, other = FakeEngine(name="a"), FakeEngine(name="b")
        router = await router_of(engine, other)
        engine.faults = {"does not sleep": Faults(sleep_error="too tired"), "does not wake": Faults(wake_error="no memory"),
                         "wakes to other weights": Faults(wrong_hash=True)}.get(fault, Faults())
        assert set(await router.sleep()) == ({"b"} if fault == "does not sleep" else {"a", "b"})
        if fault == "dies":
            engine.die()
        update = await router.update(fake_manifest(1), KEEP)
        assert list(update.acks) == ["b"]
        reason = {"dies": "signal 9", "does not sleep": "too tired", "does not wake": "no memory", "wakes to other weights": "state hash"}
        assert reason[fault] in router.reasons["a"]
        assert ("a" in update.failed) == (fault != "does not sleep")
        assert router.serving == ("b",)
        await asyncio.gather(*(consume(router, 1) for _ in range(4)))
        assert not requests_of(engine)
        other.faults = Faults(sleep_error="nor this one")
        with pytest.raises(RunAborted, match=r"no engine serves: .*nor this one"):
            await router.sleep()
    run_virtual(main())


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_engines_need_names_of_their_own(names):
    async def main():
        with pytest.raises(ConfigError, match=r"engine\.name"):
            Router([FakeEngine(name=name) for name in names])
    run_virtual(main())


def test_the_smallest_context_counts():
    async def main():
        router = Router([FakeEngine(name="a", context_tokens=100), FakeEngine(name="b", context_tokens=60)])
        assert router.context_tokens == 60
    run_virtual(main())

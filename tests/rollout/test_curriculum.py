"""Pass rates: which prompts are passed over, for how long, and what must never spin."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RunAborted
from asyncrl.rollout.curriculum import PassRates
from asyncrl.rollout.data_config import PassRateCurriculum
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout, Status
from tests.rollout.rollout_fakes import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def rates(**settings: object) -> PassRates:
    return PassRates(PassRateCurriculum(**({"kind": "pass_rate", "min_rollouts": 4} | settings)))  # type: ignore[arg-type]


def verdict(rewards: list[float], **settings: object) -> str | None:
    judge = rates(**settings)
    for reward in rewards:
        judge.observe(7, reward, asked=1)
    return judge.verdict(7)


@pytest.mark.parametrize(("rewards", "expected"), [
    ([1.0] * 4, "solved"), ([0.0] * 4, "hopeless"), ([1.0] * 3, None), ([], None), ([1.0, 0.0, 1.0, 1.0], None),
    ([0.0] * 8 + [1.0] * 4, "solved"), ([1.0] * 8 + [0.0] * 3, None), ([2.0] * 4, "solved"), ([0.999] * 4, "hopeless"),
    ([0.7 + 0.2 + 0.1] * 4, "solved")])
def test_the_newest_rollouts_decide_and_fewer_decide_nothing(rewards, expected):
    assert verdict(rewards) == expected


@pytest.mark.parametrize(("settings", "rewards", "expected"), [
    ({"solved_above": 0.75}, [1, 1, 1, 0], "solved"), ({"solved_above": 0.76}, [1, 1, 1, 0], None),
    ({"hopeless_below": 0.25}, [1, 0, 0, 0], "hopeless"), ({"hopeless_below": 0.24}, [1, 0, 0, 0], None),
    ({"solved_above": None}, [1] * 4, None), ({"hopeless_below": None}, [0] * 4, None),
    ({"solved_above": None, "hopeless_below": 1.0}, [1] * 4, "hopeless"),
    ({"success_reward": 0.5}, [0.5] * 4, "solved"), ({"min_rollouts": 1}, [1, 0], "hopeless")])
def test_both_limits_belong_to_their_side(settings, rewards, expected):
    assert verdict(rewards, **settings) == expected


def test_a_verdict_expires_when_its_source_has_asked_so_many_prompts():
    judge = rates(recheck_after_prompts=10)
    for _ in range(4):
        judge.observe(7, 1.0, asked=100)
    judge.observe(7, 1.0, asked=105)
    assert [judge.has_expired(7, asked=asked, rows=3) for asked in (100, 109, 110)] == [False, False, True]
    assert judge.verdict(7) == "solved"
    judge.forget(7)
    assert judge.verdict(7) is None


def test_left_out_a_verdict_holds_for_four_times_the_rows():
    judge = rates()
    for _ in range(4):
        judge.observe(7, 0.0, asked=0)
    assert [judge.has_expired(7, asked=asked, rows=25) for asked in (99, 100)] == [False, True]


@given(observed=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 50)), max_size=60),
       later=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0]), st.integers(50, 90)), max_size=20),
       voided=st.booleans())
def test_a_state_that_went_through_a_file_judges_as_before(observed, later, voided):
    first, second = rates(), rates()
    for row, reward, asked in observed:
        first.observe(row, reward, asked=asked)
    if voided:
        first.void(asked=50)
    second.restore(json.loads(json.dumps(first.state())))
    for judge in (first, second):
        for row, reward, asked in later:
            judge.observe(row, reward, asked=asked)
    assert second.state() == first.state()
    assert [second.verdict(row) for row in range(6)] == [first.verdict(row) for row in range(6)]


def test_verdicts_follow_the_settings_of_now_after_a_resume():
    first, strict, patient = rates(), rates(solved_above=0.5, recheck_after_prompts=5), rates(min_rollouts=8)
    for reward in (1.0, 0.0, 1.0, 0.0):
        first.observe(3, reward, asked=10)
    strict.restore(first.state())
    patient.restore(first.state())
    assert [judge.verdict(3) for judge in (first, strict, patient)] == [None, "solved", None]
    assert [strict.has_expired(3, asked=asked, rows=1) for asked in (100, 104, 105)] == [False, False, True]
    strict.forget(3)
    assert strict.verdict(3) is None


def ask(source: PromptSource, tokenizer: Tokenizer, count: int, *, reward: float | None = None, status: Status = Status.STOP) -> list[int]:
    """The rows asked next; each is rolled out four times. Row 0 is always solved, row 1 never, others half the time, unless `reward`."""
    rows = []
    for prompt in itertools.islice(source.stream(tokenizer), count):
        rows.append(prompt.row)
        for index in range(4):
            earned = {0: 1.0, 1: 0.0}.get(prompt.row, float(index % 2)) if reward is None else reward
            source.observe(prompt, Rollout(prompt_id=prompt.prompt_id, group_id=0, index=index, sequences=(), status=status,
                                           rewards={} if status.is_error else {"total": earned}))
    return rows


def questions(count: int) -> list[Prompt]:
    return [Prompt(text="1") for _ in range(count)]


def test_solved_and_hopeless_rows_are_passed_over_and_come_back_at_most_a_quarter_of_the_time(tokenizer):
    source = PromptSource(questions(4), curriculum={"kind": "pass_rate", "min_rollouts": 4})
    rows = Counter(ask(source, tokenizer, 400))
    assert rows[0] == rows[1] < 400 / (4 * 4) + 2
    assert rows[2] == pytest.approx(rows[3], abs=1)
    counts = source.metrics().result()
    assert counts["prompts/rechecked.train/last"] == rows[0] + rows[1] - 2
    assert counts["prompts/skipped_solved.train/last"] == pytest.approx(counts["prompts/skipped_hopeless.train/last"], abs=1)


@pytest.mark.parametrize("shuffle", ["none", "full", {"kind": "buffer", "rows": 2}])
def test_when_everything_is_solved_everything_is_asked_again_and_nothing_spins(tokenizer, shuffle):
    for_ever = {"kind": "pass_rate", "min_rollouts": 4, "recheck_after_prompts": 10**9}
    source = PromptSource(questions(5), shuffle=shuffle, curriculum=for_ever)
    rows = Counter(ask(source, tokenizer, 100, reward=1.0))
    assert all(count >= 15 for count in (rows[row] for row in range(5)))
    assert source.metrics().result()["prompts/rechecked.train/last"] >= 80


def test_a_source_that_is_solved_does_not_hold_up_the_others(tokenizer):
    curriculum = {"kind": "pass_rate", "min_rollouts": 4}
    mixture = Mixture({name: PromptSource(questions(3), curriculum=curriculum) for name in ("a", "b")})
    ask(mixture, tokenizer, 60, reward=1.0)
    counts = mixture.metrics().result()
    assert counts["prompts/handed_out.a/last"] == counts["prompts/handed_out.b/last"] == 30


def test_errors_are_no_evidence(tokenizer):
    source = PromptSource(questions(3), curriculum={"kind": "pass_rate", "min_rollouts": 4})
    assert ask(source, tokenizer, 30, status=Status.REWARD_TIMEOUT) == [0, 1, 2] * 10


def test_prompts_that_are_too_long_are_passed_over_and_counted_by_source(tokenizer):
    mixture = Mixture({"short": PromptSource([Prompt(text="1"), Prompt(text="1" * 9)], max_prompt_tokens=8),
                       "long": PromptSource([Prompt(text="1" * 9)], max_prompt_tokens=9)})
    prompts = list(itertools.islice(mixture.stream(tokenizer), 10))
    assert Counter((prompt.source, len(prompt.tokens)) for prompt in prompts) == {("short", 1): 5, ("long", 9): 5}
    assert mixture.metrics().result()["prompts/skipped_too_long.short/last"] == mixture.skipped == 4
    mixture.skip(prompts[1], "no_room")
    assert mixture.passed_over() == ["4 prompts of source 'short' passed over, too_long: rows 1",
                                     "1 prompts of source 'long' passed over, no_room: rows 0"]


@pytest.mark.parametrize(("make", "curriculum"), [
    (lambda: [Prompt(text="12")] * 3, "none"), (lambda: [Prompt(text="12")] * 3, "pass_rate"), (lambda: iter([Prompt(text="12")]), "none"),
    (lambda: lambda: iter([Prompt(text="12")] * 3), "none"), (lambda: itertools.repeat(Prompt(text="12")), "none")])
def test_a_source_of_prompts_that_are_all_too_long_says_so(tokenizer, make, curriculum):
    with pytest.raises(RunAborted, match=r"longer than its max_prompt_tokens = 1: the newest, row \d+, has 2"):
        next(PromptSource(make(), max_prompt_tokens=1, curriculum=curriculum).stream(tokenizer))


def test_one_short_prompt_among_long_ones_is_found_in_every_order_and_is_enough(tokenizer):
    source = PromptSource([Prompt(text="1"), *[Prompt(text="123")] * 5], shuffle="full", max_prompt_tokens=2)
    assert ask(source, tokenizer, 40) == [0] * 40

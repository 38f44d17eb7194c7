"""The cursor: wherever a source of prompts is left, another process goes on with exactly the next one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.prompt_rows import pack_prompts, unpack_prompts
from asyncrl.rollout.prompts import Mixture, PromptSource
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt, Rollout, Status
from tests.rollout.rollout_fakes import write_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


def questions(count: int) -> list[Prompt]:
    """Prompts of one to three tokens."""
    return [Prompt(text="123"[:1 + number % 3], columns={"number": number}) for number in range(count)]


def counting() -> Iterator[Prompt]:
    """Endless."""
    return (Prompt(text="1", columns={"number": number}) for number in itertools.count())


@dataclass(frozen=True)
class Described:
    """One data set and its settings: makes the source anew, as another process would."""

    kind: str
    count: int
    settings: dict[str, Any]
    seed: int

    def make(self) -> PromptSource:
        rows = questions(self.count)
        data: dict[str, Callable[[], Any]] = {
            "list": lambda: rows, "function of a list": lambda: lambda: rows, "function": lambda: lambda: iter(rows),
            "iterator": lambda: iter(rows), "endless": counting}
        return PromptSource(data[self.kind](), seed=self.seed, **self.settings)


PASS_RATE = {"kind": "pass_rate", "min_rollouts": 2}
SHUFFLES = st.one_of(st.just("none"), st.builds(lambda rows: {"kind": "buffer", "rows": rows}, st.integers(2, 9)))


@st.composite
def described(draw: st.DrawFn) -> Described:
    """Any kind of data with settings it can follow; nothing that passes over every prompt for its length."""
    kind = draw(st.sampled_from(["list", "function of a list", "function", "iterator", "endless"]))
    is_list, comes_again = "list" in kind, kind not in ("iterator", "endless")
    settings = {"shuffle": draw(st.one_of(SHUFFLES, st.just("full")) if is_list else SHUFFLES),
                "max_prompt_tokens": draw(st.sampled_from([None, 1, 2])),
                "epochs": draw(st.integers(1, 4)) if comes_again else None,
                "curriculum": draw(st.sampled_from(["none", PASS_RATE, PASS_RATE | {"recheck_after_prompts": 3}]))}
    if not is_list and (settings["epochs"] or 1) == 1:
        settings["curriculum"] = "none"
    return Described(kind, draw(st.integers(1, 7)), settings, draw(st.integers(0, 3)))


@st.composite
def sources(draw: st.DrawFn) -> Callable[[], PromptSource]:
    """How to make one data set, or a mixture of up to three."""
    parts = draw(st.lists(described(), min_size=1, max_size=3))
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0].make
    weights = {f"s{number}": draw(st.sampled_from([0.5, 1.0, 2.0, 3.3])) for number in range(len(parts))}
    return lambda: Mixture({f"s{number}": part.make() for number, part in enumerate(parts)}, weights=weights)


def rolled_out(prompt: Prompt, index: int, *, status: Status = Status.STOP, reward: float | None = None) -> Rollout:
    """A rollout whose reward depends on the prompt: some are solved always, some never, some now and then."""
    number = prompt.columns["number"]
    rewards = {} if status.is_error else {"total": float(number % 3 == 0 or (number % 3 == 1 and index == 0)) if reward is None else reward}
    return Rollout(prompt_id=prompt.prompt_id, group_id=0, index=index, sequences=(), status=status, rewards=rewards)


def asked(source: PromptSource, tokenizer: Tokenizer, count: int | None = None) -> list[Prompt]:
    """The next prompts, each rolled out twice before the next is asked."""
    prompts = []
    for prompt in itertools.islice(source.stream(tokenizer), count):
        prompts.append(prompt)
        for index in range(2):
            source.observe(prompt, rolled_out(prompt, index))
    return prompts


def left_by(source: PromptSource) -> dict[str, Any]:
    """Its state as another process reads it."""
    return json.loads(json.dumps(source.state()))


@given(make=sources(), place=st.integers(0, 40))
def test_a_source_goes_on_in_another_process_as_if_nothing_had_been(tokenizer, make, place):
    whole, first, second = make(), make(), make()
    expected = asked(whole, tokenizer, 60)
    begun = asked(first, tokenizer, place)
    second.restore(left_by(first))
    assert second.state() == first.state()
    assert begun + asked(second, tokenizer, 60 - len(begun)) == expected
    assert (second.state(), second.metrics().result()) == (whole.state(), whole.metrics().result())


@given(data=described().filter(lambda data: data.kind != "endless" and data.settings["curriculum"] == "none"))
def test_each_row_is_asked_exactly_once_an_epoch(tokenizer, data):
    limit = data.settings["max_prompt_tokens"] or 3
    fitting = Counter(number for number in range(data.count) if 1 + number % 3 <= limit)
    prompts = asked(data.make(), tokenizer)
    epochs = [prompts[start:start + len(fitting)] for start in range(0, len(prompts), len(fitting))]
    assert len(epochs) == (data.settings["epochs"] or 1)
    assert all(Counter(prompt.row for prompt in epoch) == fitting for epoch in epochs)
    assert all(prompt.row == prompt.columns["number"] for prompt in prompts)


@example(weights=[50.0] + [1.0] * 7, count=45)
@given(weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0, 50.0]), min_size=2, max_size=8), count=st.integers(1, 200))
def test_shares_of_a_mixture_are_exact_at_every_moment(tokenizer, weights, count):
    names = [f"s{number}" for number in range(len(weights))]
    mixture = Mixture({name: PromptSource(counting()) for name in names}, weights=dict(zip(names, weights, strict=True)))
    given_out = Counter(prompt.source for prompt in itertools.islice(mixture.stream(tokenizer), count))
    for name, weight in zip(names, weights, strict=True):
        assert abs(given_out[name] - count * weight / sum(weights)) <= max(1, len(weights) / 2)


def test_a_source_that_ends_drops_out_and_the_rest_keeps_its_shares(tokenizer):
    mixture = Mixture({"short": PromptSource(questions(4), epochs=1), "a": PromptSource(counting()), "b": PromptSource(counting())},
                      weights={"short": 2.0, "a": 2.0, "b": 1.0})
    names = [prompt.source for prompt in itertools.islice(mixture.stream(tokenizer), 34)]
    assert names.count("short") == 4
    assert "short" not in names[12:]
    assert (names[10:].count("a"), names[10:].count("b")) == (16, 8)
    assert mixture.names == ("short", "a", "b")


def test_prompts_of_a_mixture_are_named_by_it_and_ids_are_unique(tokenizer):
    mixture = Mixture({"x": PromptSource([Prompt(text="1", source="mine")]), "y": PromptSource([Prompt(text="2")])})
    prompts = list(itertools.islice(mixture.stream(tokenizer), 4))
    assert [(prompt.source, prompt.prompt_id, prompt.row) for prompt in prompts] == [
        ("x", "x/0", 0), ("y", "y/1", 0), ("x", "x/2", 0), ("y", "y/3", 0)]


@pytest.mark.parametrize("make", [
    lambda: Mixture({}), lambda: Mixture({"": PromptSource(counting())}),
    lambda: Mixture({"a": PromptSource(counting())}, weights={"b": 1}),
    lambda: Mixture({"a": PromptSource(counting())}, weights={"a": 0}), lambda: Mixture({"a": counting()}),  # type: ignore[dict-item]
    lambda: Mixture({"a": Mixture({"b": PromptSource(counting())})})])
def test_a_mixture_that_cannot_be_is_refused(make):
    with pytest.raises(ConfigError, match=r"prompts\.sources"):
        make()


OTHER_PROCESS = """
import json, sys
from asyncrl.rollout.prompts import PromptSource
from asyncrl.tokenizer import Tokenizer
from tests.rollout.test_prompt_cursor import questions
settings, state, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
source = PromptSource(questions(20), epochs=3, **settings)
source.restore(state)
print(json.dumps([prompt.row for prompt in source.stream(Tokenizer(folder))]))
"""


@pytest.mark.parametrize("shuffle", ["full", {"kind": "buffer", "rows": 4}])
def test_shuffles_differ_by_epoch_and_seed_and_agree_between_processes(tokenizer, tokenizer_folder, shuffle):
    def rows(seed: int) -> list[int]:
        return [prompt.row for prompt in PromptSource(questions(20), epochs=3, seed=seed, shuffle=shuffle).stream(tokenizer)]

    assert len({tuple(rows(3)[start:start + 20]) for start in (0, 20, 40)} | {tuple(range(20)), tuple(rows(4)[:20])}) == 5
    left = PromptSource(questions(20), epochs=3, seed=3, shuffle=shuffle)
    asked(left, tokenizer, 29)
    told = [json.dumps({"seed": 3, "shuffle": shuffle}), json.dumps(left.state()), str(tokenizer_folder)]
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, *told], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"})
    assert json.loads(done.stdout) == rows(3)[29:]


def test_a_resume_tokenises_nothing_that_was_handed_out(tokenizer, monkeypatch):
    first, second = (PromptSource(questions(50), epochs=3, shuffle="full") for _ in range(2))
    expected = [prompt.row for prompt in first.stream(tokenizer)][70:]
    left = PromptSource(questions(50), epochs=3, shuffle="full")
    asked(left, tokenizer, 70)
    encoded = []
    real = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(text) or real(self, text))
    second.restore(left_by(left))
    assert encoded == []
    assert [prompt.row for prompt in second.stream(tokenizer)] == expected
    assert len(encoded) == 80


def lengthened(rows: list[Prompt]) -> list[Prompt]:
    return [*rows, Prompt(text="1")]


def mended(rows: list[Prompt]) -> list[Prompt]:
    return [Prompt(text="9", columns=rows[0].columns), *rows[1:]]


def reordered(rows: list[Prompt]) -> list[Prompt]:
    return rows[::-1]


@pytest.mark.parametrize("change", [lengthened, mended, reordered])
@pytest.mark.parametrize("handed_out", [7, 14])
@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_a_list_that_has_changed_is_refused(tokenizer, change, handed_out, shuffle):
    rows = questions(8)
    first = PromptSource(rows, shuffle=shuffle)
    asked(first, tokenizer, handed_out)
    PromptSource(list(rows), shuffle=shuffle).restore(left_by(first))
    with pytest.raises(ConfigError, match="bring them back, or begin a new run"):
        PromptSource(change(rows), shuffle=shuffle).restore(left_by(first))


@pytest.mark.parametrize("change", [mended, reordered, lambda rows: rows[:5]])
def test_a_function_that_gives_other_prompts_is_refused(tokenizer, change):
    rows = questions(8)
    first = PromptSource(iter(rows))
    asked(first, tokenizer, 6)
    PromptSource(lambda: iter(rows)).restore(left_by(first))
    with pytest.raises(ConfigError, match="bring them back, or begin a new run"):
        PromptSource(iter(change(rows))).restore(left_by(first))


@pytest.mark.parametrize("other", [{"seed": 1}, {"shuffle": "none"}, {"curriculum": PASS_RATE}])
def test_other_settings_of_the_order_are_refused(tokenizer, other):
    settings = {"shuffle": "full", "seed": 0}
    first = PromptSource(questions(8), **settings)
    asked(first, tokenizer, 3)
    with pytest.raises(ConfigError, match="the run began with"):
        PromptSource(questions(8), **(settings | other)).restore(left_by(first))


def test_other_sources_or_weights_are_refused(tokenizer):
    first = Mixture({"a": PromptSource(counting()), "b": PromptSource(counting())})
    with pytest.raises(ConfigError, match=r"prompts\.sources"):
        Mixture({"a": PromptSource(counting())}).restore(left_by(first))
    with pytest.raises(ConfigError, match="prompts weight"):
        Mixture({"a": PromptSource(counting()), "b": PromptSource(counting())}, weights={"b": 2.0}).restore(left_by(first))


def test_a_source_that_was_begun_is_not_restored(tokenizer):
    source = PromptSource(questions(3))
    asked(source, tokenizer, 1)
    with pytest.raises(RuntimeError, match="before the first prompt"):
        source.restore(left_by(source))


@pytest.mark.parametrize(("data", "settings", "field"), [
    (counting, {"shuffle": "full"}, "shuffle"), (counting(), {"epochs": 2}, "epochs"),
    (counting(), {"curriculum": "pass_rate"}, "curriculum"), (counting, {"curriculum": "pass_rate"}, "curriculum"),
    (questions(3), {"shuffle": {"kind": "buffer", "rows": 1}}, "shuffle"),
    (questions(3), {"max_prompt_tokens": 0}, "max_prompt_tokens"), (questions(3), {"epoch": 1}, "epoch"),
    (questions(3), {"curriculum": {"kind": "pass_rate", "solved_above": 0.5, "hopeless_below": 0.5}}, "curriculum")])
def test_settings_the_data_cannot_follow_are_refused(data, settings, field):
    with pytest.raises(ConfigError, match=field):
        PromptSource(data, **settings)


def test_a_function_is_called_again_for_each_epoch_and_a_list_is_made_once(tokenizer):
    calls = []
    for made in (questions, lambda count: iter(questions(count))):
        source = PromptSource(lambda made=made: calls.append(made) or made(3), epochs=3)
        assert [prompt.row for prompt in source.stream(tokenizer)] == [0, 1, 2] * 3
    assert len(calls) == 1 + 3


def test_prompts_survive_the_wire_whole():
    prompt = Prompt(text="1", tokens=(1, 2), columns={"a": [1, {"b": None}], "c": "\ud83d"}, source="s", prompt_id="s/3", row=7,
                    messages=({"role": "user", "content": "1"},))
    assert unpack_prompts(pack_prompts([prompt, Prompt()])) == (prompt, Prompt())
    again = unpack_prompts(pack_prompts(unpack_prompts(pack_prompts([prompt]))))
    assert again == (prompt,)
    with pytest.raises(ConfigError, match=r"prompts\.columns\.made_of"):
        pack_prompts([prompt, Prompt(columns={"fine": 1, "made_of": {1, 2}})])


def test_the_cursor_of_a_list_is_small(tokenizer):
    source = PromptSource(questions(10_000), shuffle="full")
    asked(source, tokenizer, 9000)
    assert len(json.dumps(source.state())) < 500


def test_columns_of_any_kind_have_a_checksum(tokenizer):
    odd = [Prompt(text="1", columns={"set": {1}, "big": 2**80, (1, 2): float("nan"), "half": "\ud83d"}, tokens=(4,))]
    first, second = PromptSource(odd), PromptSource(odd)
    asked_once = next(first.stream(tokenizer))
    second.restore(left_by(first))
    assert asked_once.row == 0

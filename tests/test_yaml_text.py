"""What is read as YAML is bounded, and whatever it cannot be is one kind of error."""

from __future__ import annotations

import itertools
import time

import pytest

from asyncrl import yaml_text

LETTERS = "abcdefghijkl"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(LETTERS))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{number}: &a{number} [[[[[[[[*a{number - 1}]]]]]]]]\n" for number in range(1, 20))


@pytest.mark.parametrize("text", [
    BOMB, CHAIN, "a: &a [*a]", "&a {b: *a}", "&a [*a, *a, *a]", "[" * 5000 + "]" * 5000, "{a: " * 3000 + "1" + "}" * 3000, "a: 2001-99-99",
    "a: !!int foo", "a: !!float foo", "a: !!bool foo", "a: !!timestamp foo", f"a: {'9' * 5000}", "a: " + "a" * (1 << 21), "? [a]\n: 1",
    "a: 1\na: 2", "a: \ud83d", "a: \0",
], ids=lambda text: repr(text[:20]))
def test_what_no_recipe_can_be_is_refused_at_once(text: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(yaml_text.YAMLError):
        yaml_text.read(text)
    assert time.monotonic() - began_s < 5.0


def test_an_alias_stands_for_what_it_names() -> None:
    assert yaml_text.read("a: &a {b: [1, 2]}\nc: *a\nd: [*a, *a]") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": [{"b": [1, 2]}] * 2}


def test_nothing_is_nothing() -> None:
    assert yaml_text.read("") is None
    assert yaml_text.read("# a comment") is None


def test_the_deepest_tree_is_read_and_one_level_more_is_not() -> None:
    deepest = "[" * (yaml_text.DEEPEST - 1) + "1" + "]" * (yaml_text.DEEPEST - 1)
    assert yaml_text.read(deepest)
    with pytest.raises(yaml_text.YAMLError, match="levels deep"):
        yaml_text.read(f"[{deepest}]")

"""Numbers as text: whatever the value, the width holds and the sense stays."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from asyncrl.observe.figures import columns, count, duration, encodable, number, percent, shorten, sparkline, wrapped

ANY = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@settings(deadline=None)
@given(ANY, st.integers(5, 9))
def test_no_value_is_wider_than_its_column(value, width):
    assert len(number(value, width=width)) <= width
    assert len(count(value, width=width)) <= width
    assert len(duration(value)) <= 6
    assert len(percent(value)) <= 5


@pytest.mark.parametrize(("value", "text"), [
    (0.4375, "0.438"), (-0.25, "-0.250"), (12.0, "12.000"), (1234.5678, "1234.6"), (123456.7, "123457"), (1e9, "1e+09"), (1e-5, "1e-05"),
    (-1e-300, "0"), (0.0, "0.000"), (-0.0, "-0.000"), (None, "-"), (math.nan, "nan"), (-math.inf, "-inf")])
def test_numbers_keep_what_fits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9999, "9999"), (12345, "12.3k"), (999999, "1000k"), (1.5e6, "1.5M"), (2e12, "2.0T"),
                                             (1e300, "#####"), (None, "-")])
def test_counts_have_a_prefix(value, text):
    assert count(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.0%"), (1, "100%"), (0.004, "0.4%"), (0.0001, "<0.1%"), (0.9996, "100%"),
                                             (-0.5, "-50%"), (None, "-")])
def test_a_share_that_is_not_0_does_not_read_0(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (8040, "2h14m"), (273600, "3d04h"),
                                               (1e9, ">99d"), (None, "-"), (math.nan, "nan")])
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_goes_from_lowest_to_highest_and_leaves_out_what_is_not_finite():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, math.nan, 2.0]) == "▁ ▁"
    assert sparkline([]) == ""
    assert len(sparkline([-1e308, 1e308, 0.0])) == 3


def test_what_an_encoding_lacks_is_shown_in_ascii_of_the_same_length():
    text = "0.3 ▁▅█ → …ü"
    assert encodable(text, "utf-8") == text
    assert encodable(text, "ascii") == "0.3 _+# > ~?"
    assert encodable(text, "no such encoding") == "0.3 _+# > ~?"


@settings(deadline=None)
@given(st.text(), st.integers(8, 90))
@example("0000000❓", 8)
def test_no_line_of_a_sentence_is_wider_than_asked_in_any_script(text, width):
    for line in wrapped(text, width, indent="  "):
        assert columns(line) <= width
        assert line.isprintable()
    assert columns(shorten(text, width)) <= width


def test_letters_of_two_columns_are_counted_as_such():
    assert (columns("数学 ok"), cell_len("数学 ok")) == (7, 7)
    assert wrapped("数学 数学 数学", 9) == ["数学 数学", "数学"]
    assert shorten("数学数学", 6) == "数学…"


def test_a_long_name_is_cut_and_stays_on_its_line():
    assert shorten("a\nb\tc", 9) == "a b c"
    assert shorten("0123456789", 5) == "0123…"

"""A file that another process writes: half a line waits, a file that was cut or replaced is read anew."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observe.follow import Follower, News


def line(step: int, **more: object) -> bytes:
    return json.dumps({"step": step, **more}).encode() + b"\n"


def steps(news: News) -> list[int]:
    return [row["step"] for row in news.rows]


def test_a_missing_file_is_an_empty_one(tmp_path):
    assert Follower(tmp_path / "metrics.jsonl").look() == News(())


def test_each_row_comes_once_and_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(line(1) + line(2)[:7])
    assert steps(follower.look()) == [1]
    assert steps(follower.look()) == []
    path.write_bytes(line(1) + line(2) + line(3))
    assert steps(follower.look()) == [2, 3]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=12))
def test_wherever_the_file_ends_meanwhile_the_rows_are_the_same(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("follow") / "metrics.jsonl"
    data = b"".join(line(step, text="ü" * step) for step in range(8))
    follower, seen, end = Follower(path), [], 0
    for cut in [*cuts, len(data)]:
        end = min(len(data), end + cut)
        path.write_bytes(data[:end])
        news = follower.look()
        assert not news.was_rewritten
        seen += steps(news)
    assert seen == list(range(8))


def test_a_file_that_was_cut_and_went_on_is_read_anew_however_long_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(b"".join(line(step, loss=0.1) for step in range(1, 6)))
    follower.look()
    path.write_bytes(b"".join(line(step, loss=0.1) for step in range(1, 4)))
    shorter = follower.look()
    assert (steps(shorter), shorter.was_rewritten) == ([1, 2, 3], True)
    path.write_bytes(line(1, loss=0.1) + b"".join(line(step, loss=0.2) for step in range(2, 30)))
    longer = follower.look()
    assert (steps(longer), longer.was_rewritten) == (list(range(1, 30)), True)
    assert follower.look() == News(())


def test_a_file_that_was_taken_away_is_another_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_bytes(line(1))
    follower.look()
    path.unlink()
    assert follower.look() == News((), was_rewritten=True)
    path.write_bytes(line(1))
    assert steps(follower.look()) == [1]


def test_lines_that_are_no_rows_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1)[:9] + line(2) + b"\n[1]\n\xff\xfe\n" + line(3))
    news = Follower(path).look()
    assert (steps(news), news.unreadable) == ([3], 3)


def test_what_no_run_writes_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    absurd = ('{"step": 1e400}', '{"step": "a"}', '{"step": [1]}', '{"step": 2, "reward/total/mean": "x"}', '{"step": 2, "wall_s": {}}',
              '{"eval_version": {}}', '{"step": NaN}', '{"step": 2, "a/b/mean": 1e999}', "[" * 100_000)
    path.write_text("\n".join(absurd) + '\n{"step": 3, "a/b/mean": null}\n', encoding="utf-8")
    assert Follower(path).look() == News(({"step": 3, "a/b/mean": None},), unreadable=len(absurd))

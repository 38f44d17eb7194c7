"""Rows on disk: readable at once, valid JSON whatever the numbers, rollouts that load again token by token."""

from __future__ import annotations

import json
import math

import numpy as np

from asyncrl.observe.jsonl import JsonlWriter, cut_jsonl, iterate_jsonl, rollout_rows
from asyncrl.types import Prompt, Rollout, RolloutGroup, SequenceBuilder, Status


def test_a_row_can_be_read_while_the_file_is_open(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 1, "a/b/mean": 0.5})
    assert list(iterate_jsonl(path)) == [{"step": 1, "a/b/mean": 0.5}]
    writer.write({"step": 2})
    writer.close()
    writer.close()
    assert [row["step"] for row in iterate_jsonl(path)] == [1, 2]


def test_nan_and_infinity_become_null_and_numpy_numbers_numbers_at_any_depth(tmp_path):
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    writer.write({"a": math.nan, "b": [math.inf, 1, {"c": np.float32(0.5)}],
                  "d": np.float64("nan"), "e": (np.int64(3), np.bool_(True)), "f": None})
    writer.close()
    text = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": None, "b": [None, 1, {"c": 0.5}], "d": None, "e": [3, True], "f": None}
    assert "NaN" not in text


def test_a_line_break_in_a_text_does_not_break_the_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    writer = JsonlWriter(path)
    writer.write({"text": "a\nb\u2028c"})
    writer.close()
    assert list(iterate_jsonl(path)) == [{"text": "a\nb\u2028c"}]


def test_rows_that_are_written_after_a_cut_stand_on_lines_of_their_own(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for torn in ('{"step": 3}', '{"st', ""):
        path.write_text('{"step": 1}\n{"step": 2}\n' + torn, encoding="utf-8")
        cut_jsonl(path, keep=lambda row: row["step"] != 2)
        writer = JsonlWriter(path)
        writer.write({"step": 4})
        writer.close()
        assert [row["step"] for row in iterate_jsonl(path)] == ([1, 3, 4] if torn == '{"step": 3}' else [1, 4])
    path.write_text('{"step": 1}', encoding="utf-8")
    assert cut_jsonl(path, keep=lambda row: True) == [{"step": 1}]
    assert path.read_text(encoding="utf-8") == '{"step": 1}\n'


def test_what_is_no_object_is_no_row_whatever_a_lost_power_left_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n\xff\xfe\n[]\n3\nnull\n"x"\n' + b"[" * 100_000 + b'\n{"step": 2}\n{"st')
    assert list(iterate_jsonl(path)) == [{"step": 1}, {"step": 2}]
    assert cut_jsonl(path, keep=lambda row: row["step"] <= 2) == [{"step": 1}, {"step": 2}]
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_rollout_loads_again_token_by_token(tmp_path):
    builder = SequenceBuilder([5, 6])
    builder.sampled(np.asarray([7, 8], np.int32), logprobs=np.asarray([-0.25, -1.5], np.float32), policy_version=3, kv_fresh=True, turn=0)
    builder.given([9], turn=1)
    builder.sampled(np.asarray([1], np.int32), logprobs=np.asarray([-0.5], np.float32), policy_version=4, kv_fresh=True, turn=1)
    rollout = Rollout("sums/7", 12, 3, (builder.build(),), Status.STOP, {"exact": np.float32(1.0)})
    rows = rollout_rows(RolloutGroup(12, Prompt(prompt_id="sums/7"), (rollout,)), step=40, decode=lambda tokens: "".join(map(str, tokens)))
    writer = JsonlWriter(tmp_path / "rollouts.jsonl")
    writer.write(rows[0])
    writer.close()
    assert list(iterate_jsonl(tmp_path / "rollouts.jsonl")) == [{
        "step": 40, "prompt_id": "sums/7", "group_id": 12, "index": 3, "status": "stop", "error": "",
        "rewards": {"exact": 1.0}, "text": "567891",
        "tokens": [5, 6, 7, 8, 9, 1], "loss_mask": [0, 0, 1, 1, 0, 1], "rollout_logprobs": [0, 0, -0.25, -1.5, 0, -0.5],
        "policy_versions": [-1, -1, 3, 3, -1, 4]}]


def test_each_sequence_of_each_rollout_has_a_row():
    def rollout(index: int, sequences: int) -> Rollout:
        return Rollout("p", 1, index, tuple(SequenceBuilder([1]).build() for _ in range(sequences)), Status.ENV_ERROR)
    rows = rollout_rows(RolloutGroup(1, Prompt(prompt_id="p"), (rollout(0, 2), rollout(1, 0), rollout(2, 1))), step=1, decode=str)
    assert [row["index"] for row in rows] == [0, 0, 2]

"""Recorded batches: what is written is what is read, and what cannot be a batch is refused by the name of the array at fault."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.correction import CorrectionBatch, correct, preset
from asyncrl.errors import ConfigError
from asyncrl.paths import recorded_batches
from asyncrl.train.recorded import FIELDS, keep_newest, load_recorded, save_recorded
from asyncrl.train.trainer import Trainer
from tests.train.test_trainer import inline, paths_in
from tests.train.train_data import random_batch

GOOD: dict[str, Any] = {
    "rollout_logprobs": np.array([0.0, -1.0, -2.0, 0.0, -0.5], np.float32), "proximal_logprobs": np.full(5, -1.0, np.float32),
    "advantages": np.ones(5, np.float32), "loss_mask": np.array([0, 1, 1, 0, 1], np.bool_), "turn_ids": np.zeros(5, np.int16),
    "policy_versions": np.array([-1, 3, 3, -1, 4], np.int32), "cu_seqlens": np.array([0, 3, 5]), "group_ids": np.array([0, 0]),
    "version": 4}


def written(path: Path, **changes: Any) -> Path:
    arrays = {name: value for name, value in (GOOD | changes).items() if value is not None}
    np.savez(path, **arrays)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recorded(path)
    assert caught.value.value == str(path)
    return caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_is_what_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    batch = load_recorded(written(tmp_path / "given.npz"))
    batch = dataclasses.replace(batch, **{name: getattr(batch, name).to(dtype) for name in FIELDS[:3]})
    save_recorded(batch, tmp_path / "folder" / "step-00000001.npz")
    again = load_recorded(tmp_path / "folder" / "step-00000001.npz")
    assert again.version == 4
    for name in FIELDS:
        if name != "version":
            assert torch.equal(getattr(again, name), getattr(batch, name)), name
            assert getattr(again, name).dtype == getattr(batch, name).dtype
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["step-00000001.npz"]


def test_arrays_in_the_byte_order_and_width_of_another_machine_are_read(tmp_path: Path) -> None:
    wide = {"rollout_logprobs": GOOD["rollout_logprobs"].astype(">f8"), "cu_seqlens": np.array([0, 3, 5], ">u2"),
            "advantages": GOOD["advantages"].astype(np.float16)}
    batch = load_recorded(written(tmp_path / "batch.npz", **wide))
    assert isinstance(batch, CorrectionBatch)
    assert (batch.rollout_logprobs.dtype, batch.advantages.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_array_is_named(tmp_path: Path, name: str) -> None:
    assert refusal(written(tmp_path / "batch.npz", **{name: None})).startswith(f"it lacks {name}")


@pytest.mark.parametrize(("changes", "says"), [
    ({"advantages": np.ones(4, np.float32)}, "advantages has shape (4,), needs (5,)"),
    ({"loss_mask": np.ones((5, 1), np.bool_)}, "loss_mask has shape (5, 1), needs (5,)"),
    ({"loss_mask": np.bool_(True)}, "rollout_logprobs has shape"),
    ({"cu_seqlens": np.array([0, 5])}, "cu_seqlens has shape (2,), needs (3,)"),
    ({"version": np.array([4])}, "version has shape (1,), needs ()"),
    ({"loss_mask": np.ones(5, np.int64)}, "loss_mask is int64, needs bool"),
    ({"advantages": np.ones(5, np.int64)}, "advantages is int64, needs a floating dtype"),
    ({"advantages": np.ones(5, np.complex64)}, "advantages is complex64, needs a floating dtype"),
    ({"turn_ids": np.zeros(5)}, "turn_ids is float64, needs an integer dtype"),
    ({"version": 4.0}, "version is float64, needs an integer dtype"),
    ({"advantages": np.array(["a"] * 5)}, "advantages is <U1, needs a floating dtype"),
    ({"cu_seqlens": np.array([0, 4, 4])}, "cu_seqlens must rise from 0 to T = 5"),
    ({"cu_seqlens": np.array([0, 9, 5])}, "cu_seqlens must rise from 0 to T = 5"),
    ({"cu_seqlens": np.array([-3, 3, 5])}, "cu_seqlens must rise from 0 to T = 5"),
    ({"version": 3}, "a token is newer than version 3"),
    ({"policy_versions": np.full(5, -1)}, "no policy version sampled"),
    ({"proximal_logprobs": np.full(5, np.nan)}, "proximal_logprobs must be finite at every loss token"),
])
def test_an_array_that_does_not_fit_is_named_with_what_it_needs(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(written(tmp_path / "batch.npz", **changes))


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    refusal(written(tmp_path / "objects.npz", advantages=np.array([Trap()] * 5, object)))
    with zipfile.ZipFile(written(tmp_path / "raw.npz", advantages=None), "a") as file:
        file.writestr("advantages.npy", pickle.dumps(Trap()))
    refusal(tmp_path / "raw.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_claims_more_than_a_step_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as file:
        for name, value in GOOD.items():
            header, array = io.BytesIO(), np.asarray(value)
            shape = {1: (10**12,), 0: ()}[array.ndim] if name not in ("group_ids", "cu_seqlens") else array.shape
            np.lib.format.write_array_header_1_0(header, {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False,
                                                          "shape": shape})
            file.writestr(f"{name}.npy", header.getvalue())
    assert "at most 100,000,000" in refusal(tmp_path / "huge.npz")


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04" + bytes(200)])
def test_what_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch.npz").write_bytes(content)
    assert "cannot be read as .npz" in refusal(tmp_path / "batch.npz")


@pytest.mark.parametrize("header", [
    "(" * 3000, "(" * 150, "[" * 9000, "-" * 9000, "'", '"""', "{'descr': '<f4', ", "{[]: 1}", "{1: 2, 'a': 3}", "1e999",
    *(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}" for descr, shape in [
        ("()", "(5,)"), ("[()]", "(5,)"), ("[1]", "(5,)"), ("('f4',)", "(5,)"), ("('f4', 5, 6)", "(5,)"), ("{}", "(5,)"),
        ("{'names': 1}", "(5,)"), ("'f4, ('", "(5,)"), ("'O'", "(5,)"), ("'<f4'", "(-5,)"), ("'<f4'", f"({10**40},)"),
        ("'<f4'", "(True,)"), ("'<f4'", "5")])])
def test_an_array_whose_header_is_nonsense_is_refused(tmp_path: Path, header: str) -> None:
    with zipfile.ZipFile(written(tmp_path / "batch.npz", advantages=None), "a") as file:
        file.writestr("advantages.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(20))
    refusal(tmp_path / "batch.npz")


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.npz") == "there is no such file."


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_a_batch_or_a_config_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(written(tmp_path / "batch.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "batch.npz").write_bytes(content[:data.draw(st.integers(len(content) // 2, len(content)))])
    with contextlib.suppress(ConfigError):
        load_recorded(tmp_path / "batch.npz")


def test_the_newest_are_kept_and_listed_oldest_first(tmp_path: Path) -> None:
    (tmp_path / "corrections").mkdir()
    for step in (9, 10, 100, 8):
        written(tmp_path / "corrections" / f"step-{step:08d}.npz")
    keep_newest(tmp_path, count=3)
    assert [path.name for path in recorded_batches(tmp_path)] == ["step-00000009.npz", "step-00000010.npz", "step-00000100.npz"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_is_recorded_as_it_was_corrected(tiny: Path, tmp_path: Path, updates: int) -> None:
    """Correcting the file again gives the metrics that the step had, whether the proximal logprobs had a pass of their own or not."""
    measured = {}

    async def use(trainer: Trainer) -> None:
        for version in range(4):
            measured[version + 1] = (await trainer.step(random_batch(version, version=version))).metrics

    inline(tiny, tmp_path, use, record_batches_every_steps=2, epochs=updates)
    files = recorded_batches(paths_in(tmp_path).root)
    assert [file.name for file in files] == ["step-00000002.npz", "step-00000004.npz"]
    for step, file in zip((2, 4), files, strict=True):
        batch = load_recorded(file)
        again = correct(batch, preset("token_tis")).metrics.result()
        assert batch.version == step - 1
        assert again["correction/logprob_gap/mean"] > 0.1
        for name in ("correction/logprob_gap/mean", "correction/weight/mean", "correction/ess/frac", "correction/chi2_sequence/mean"):
            assert again[name] == pytest.approx(measured[step].result()[name], rel=1e-6), name


def test_nothing_is_recorded_unless_it_is_asked_for(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        await trainer.step(random_batch(0, version=0))

    inline(tiny, tmp_path, use)
    assert recorded_batches(paths_in(tmp_path).root) == []
    assert not (paths_in(tmp_path).root / "corrections").exists()


def test_a_guess_is_not_recorded_as_proximal_logprobs(tiny: Path) -> None:
    custom = {"kind": "custom", "proximal": "log_linear"}
    Trainer(tiny, correction=custom, learning_rate=1e-3, record_batches_every_steps=2)
    with pytest.raises(ConfigError, match=re.escape("trainer.record_batches_every_steps, correction.proximal")):
        Trainer(tiny, correction=custom, learning_rate=1e-3, record_batches_every_steps=2, epochs=2)

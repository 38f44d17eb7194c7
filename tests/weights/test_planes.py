import contextlib
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights import planes
from asyncrl.weights.planes import BLOCK_BYTES, LEVEL, pack, unpack


def packed(*chunks):
    return np.frombuffer(b"".join(pack(chunks)), np.uint8)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20))
def test_what_is_packed_is_unpacked(chunks):
    whole = b"".join(chunks)
    assert unpack(packed(*chunks), size=len(whole)).tobytes() == whole


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 7])
def test_bytes_do_not_depend_on_where_chunks_end(size):
    whole = np.random.default_rng(size).bytes(size)
    cuts = sorted(np.random.default_rng(1).integers(0, size + 1, 5))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, size], strict=True)]
    assert packed(whole).tobytes() == packed(*pieces).tobytes()
    assert unpack(packed(whole), size=size).tobytes() == whole


def test_a_block_is_its_even_bytes_then_its_odd_ones():
    whole = np.arange(2 * BLOCK_BYTES + 5, dtype=np.uint32).astype(np.uint8)
    blocks = [whole[start:start + BLOCK_BYTES] for start in range(0, len(whole), BLOCK_BYTES)]
    planar = np.concatenate([plane for block in blocks for plane in (block[::2], block[1::2])]).tobytes()
    stored = zstandard.ZstdDecompressor().decompress(packed(whole.tobytes()).tobytes(), max_output_size=len(planar))
    assert stored == planar
    assert unpack(np.frombuffer(zstandard.ZstdCompressor(LEVEL).compress(planar), np.uint8), size=len(whole)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("size", [10**5 - 1, 10**5 + 1, 0])
def test_another_size_than_was_promised_is_refused(size):
    with pytest.raises(WeightSyncError, match=r"ends too early|more than \d+ bytes"):
        unpack(packed(bytes(10**5)), size=size)


def test_no_more_is_made_than_was_promised():
    bomb = np.frombuffer(zstandard.ZstdCompressor(1).compress(bytes(1 << 28)), np.uint8)
    code = ("import sys, resource, numpy as np\nfrom asyncrl.weights.planes import unpack\nfrom asyncrl.errors import WeightSyncError\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "try: unpack(np.frombuffer(sys.stdin.buffer.read(), np.uint8), size=1000)\n"
            "except WeightSyncError as error: print(error)\nassert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10")
    done = subprocess.run([sys.executable, "-c", code], input=bomb.tobytes(), capture_output=True, timeout=60, check=True)
    assert b"more than 1000 bytes" in done.stdout or b"cannot be unpacked" in done.stdout


@pytest.mark.parametrize("place", range(0, 60, 7))
def test_a_damaged_frame_gives_other_bytes_or_an_error_and_never_more(place):
    whole = np.random.default_rng(0).integers(0, 4, 4000, dtype=np.uint8).tobytes()
    frame = packed(whole).copy()
    frame[place] ^= 0x55
    with contextlib.suppress(WeightSyncError):
        assert len(unpack(frame, size=len(whole))) == len(whole)


def test_one_ulp_changes_of_one_percent_take_three_bytes_each():
    rng = np.random.default_rng(0)
    weights = ((rng.standard_normal(1 << 22).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    changes = rng.random(len(weights)) < 0.01
    new = np.where(changes, weights + rng.choice(np.array([1, 65535], np.uint16), len(weights)), weights).astype(np.uint16)
    places = np.flatnonzero(changes)
    counts = np.bincount(places >> 16, minlength=len(weights) >> 16).astype(np.uint32)
    payload = counts.tobytes() + places.astype(np.uint16).tobytes() + new[places].tobytes()  # blk16
    assert len(payload) / changes.sum() == pytest.approx(4.01, abs=0.01)
    assert 2.7 < len(packed(payload)) / changes.sum() < 3.0


def test_a_window_that_is_larger_than_ours_is_refused(monkeypatch):
    parameters = zstandard.ZstdCompressionParameters(window_log=25)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = np.frombuffer(frame.compress(bytes(1000)) + frame.flush(), np.uint8)
    assert planes.WINDOW_BYTES < 1 << 25
    with pytest.raises(WeightSyncError, match="cannot be unpacked"):
        unpack(data, size=1000)

"""Both implementations give the same bits, and those are what the plainest way to compute them gives."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights import kernels, numpy_kernels
from asyncrl.weights.codec import BLOCK_ELEMENTS, MODES
from asyncrl.weights.encoder import not_finite_place
from asyncrl.weights.state_hash import hash_at, hash_bits, hash_delta, origin, tensor_seed
from tests.weights.codec_oracle import encode

numba_kernels = pytest.importorskip("asyncrl.weights.numba_kernels", reason="needs numba", exc_type=ImportError)
BOTH = (numpy_kernels, numba_kernels)
WORDS = (np.uint8, np.uint16, np.uint32, np.uint64)
both = pytest.mark.parametrize("used", BOTH, ids=lambda module: module.__name__.rpartition(".")[2])
lengths_of_runs = st.lists(st.one_of(st.integers(1, 200), st.sampled_from([
    63, 64, 65, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS + 64])), min_size=1, max_size=5)
SEED = tensor_seed("model.norm.weight", "BF16")


def states(word, lengths, *, density: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of the runs, of which some share differs."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(word).max, sum(lengths), dtype=word, endpoint=True)
    return old, np.where(rng.random(len(old)) < density, old ^ word(1 << rng.integers(8 * word().itemsize)), old)


def scanned(used, new, old, lengths):
    """What a scan writes, cut to size; `old` is moved."""
    runs = np.array(lengths, np.int64)
    blocks = np.empty(sum(-(-length // BLOCK_ELEMENTS) for length in lengths), np.uint32)
    offsets, values, olds, counts = np.empty(len(old), np.uint16), np.empty_like(old), np.empty_like(old), np.empty(len(runs), np.int64)
    found = used.scan(new, old, runs, offsets, values, olds, blocks, counts)
    return offsets[:found], values[:found], olds[:found], blocks, counts


def scanned_from(sources, old, lengths):
    """As `scanned`, of the bits of float32 in several arrays."""
    return scanned(SimpleNamespace(scan=numba_kernels.scan_sources), sources, old, lengths)


def cut(array, lengths):
    return np.split(array, np.cumsum(lengths)[:-1])


@both
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(WORDS), lengths_of_runs, st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]), st.integers(0, 2**32), st.integers(0, 3))
def test_a_scan_names_what_differs_and_moves_the_old_bits(used, word, lengths, density, seed, skew):
    old, new = states(word, lengths, density=density, seed=seed)
    old, new = (np.concatenate([np.zeros(skew, word), bits])[skew:] for bits in (old, new))  # not at the edge of a vector
    moved = old.copy()
    offsets, values, olds, blocks, counts = scanned(used, new, moved, lengths)
    assert np.array_equal(moved, new)
    expected = [np.flatnonzero(run != before) for run, before in zip(cut(new, lengths), cut(old, lengths), strict=True)]
    assert counts.tolist() == [len(indices) for indices in expected]
    assert np.array_equal(offsets, np.concatenate(expected) % BLOCK_ELEMENTS)
    assert blocks.tolist() == [np.count_nonzero(indices // BLOCK_ELEMENTS == block)
                               for indices, length in zip(expected, lengths, strict=True) for block in range(-(-length // BLOCK_ELEMENTS))]
    changed = np.flatnonzero(new != old)
    assert np.array_equal(values, new[changed])
    assert np.array_equal(olds, old[changed])


SPECIAL = np.array([0, 0x8000_0000, 0x3F80_8000, 0x3F81_8000, 0x3F80_7FFF, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 1, 0x8000, 0x8001],
                   np.uint32)
"""Zeros, halves between two values of bfloat16, what rounds to infinity, infinities, the least numbers."""


@settings(deadline=None, max_examples=40)
@given(lengths_of_runs, st.sampled_from([0.001, 0.5, 1.0]), st.integers(0, 2**32), st.integers(1, 3))
def test_float32_is_rounded_on_the_way_as_torch_rounds_it_and_where_it_lies(lengths, density, seed, arrays):
    rng = np.random.default_rng(seed)
    wide = np.where(rng.random(sum(lengths)) < 0.1, rng.choice(SPECIAL, sum(lengths)),
                    rng.integers(0, 1 << 32, sum(lengths), dtype=np.uint32))
    wide[np.isnan(wide.view(np.float32))] = 0x4000_0000
    rounded = torch.from_numpy(wide.view(np.float32)).bfloat16().view(torch.uint16).numpy()
    old = np.where(rng.random(len(rounded)) < density, rounded ^ np.uint16(1), rounded)
    moved = old.copy()
    expected = scanned(numpy_kernels, rounded, old, lengths)
    edges = np.cumsum(lengths)[:-1][::arrays]  # of runs, some of which lie in one array
    found = scanned_from(np.split(wide, edges), moved, lengths)
    assert all(map(np.array_equal, found, expected))
    assert np.array_equal(moved, rounded)


def test_whatever_nan_float32_is_it_is_one_that_is_not_finite_as_published():
    nan = np.array([0x7F80_0001, 0xFFFF_FFFF, 0x7FFF_FFFF, 0xFF80_0001] * 33, np.uint32)
    held = np.zeros(len(nan), np.uint16)
    scanned_from([nan], held, [len(nan)])
    assert set(held.tolist()) == {0x7FC0}


@both
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700), st.sampled_from([0.0, 0.03, 0.5, 1.0]), st.integers(0, 2**32))
def test_flags_name_their_elements(used, length, density, seed):
    set_bits = np.random.default_rng(seed).random(length) < density
    set_bits[length // 2] = True
    flags, expected = np.packbits(set_bits, bitorder="little"), np.flatnonzero(set_bits)
    out = np.empty(len(expected), np.int64)
    assert used.flag_indices(flags, length, out) is True
    assert np.array_equal(out, expected)
    assert used.flag_indices(flags, length, np.empty(len(expected) + 1, np.int64)) is False
    assert used.flag_indices(flags, length, np.empty(len(expected) - 1, np.int64)) is False


@both
@pytest.mark.parametrize("word", WORDS)
def test_one_value_that_is_not_held_is_noticed(used, word):
    memory, indices = np.arange(100).astype(word), np.arange(0, 100, 3)
    values = memory[indices].copy()
    assert used.holds(memory, indices, values) is True
    memory[1] += word(1)  # nobody asked for it
    assert used.holds(memory, indices, values) is True
    memory[99] += word(1)
    assert used.holds(memory, indices, values) is False


@both
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(WORDS), lengths_of_runs, st.data())
def test_packed_bytes_are_those_of_the_format(used, word, lengths, data):
    old, new = states(word, lengths, density=data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])), seed=data.draw(st.integers(0, 2**32)))
    expected = [np.flatnonzero(run != before) for run, before in zip(cut(new, lengths), cut(old, lengths), strict=True)]
    modes = [data.draw(st.sampled_from(MODES)) for _ in lengths]
    wanted = b"".join(encode(run, indices, mode=mode) for run, indices, mode in zip(cut(new, lengths), expected, modes, strict=True))
    if not any(map(len, expected)):
        return  # nothing is packed then
    offsets, values, _, blocks, counts = scanned(used, new, old, lengths)
    out = np.empty(len(wanted), np.uint8)
    codes = np.array([MODES.index(mode) for mode in modes], np.uint8)
    packed = used.pack(np.array(lengths), counts, codes, new.view(np.uint8), offsets.view(np.uint8), values.view(np.uint8),
                       blocks.view(np.uint8), out)
    assert (packed, out.tobytes()) == (len(wanted), wanted)


@both
def test_bits_are_compared_not_values(used):
    # 0.0 == -0.0 and NaN != NaN as values; as bits the first pair differs and the second does not (W10)
    old = np.array([0.0, np.nan, 1.0], np.float32).view(np.uint32)
    new = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint32)
    offsets, values, olds, *_ = scanned(used, new, old, [3])
    assert (offsets.tolist(), values.tolist(), olds.tolist()) == ([0], [0x80000000], [0])


@both
def test_blk16_bytes_are_counts_then_offsets_then_values(used):
    new = np.zeros(BLOCK_ELEMENTS + 4, np.uint16)
    new[[1, 258, BLOCK_ELEMENTS + 3]] = [0x1122, 0x3344, 0x5566]
    assert packed_alone(used, new, "blk16") == "02000000" "01000000" "0100" "0201" "0300" "2211" "4433" "6655"


@both
def test_bitmap_bytes_are_flags_lowest_bit_first_then_values(used):
    new = np.array([9, 0, 0, 3, 0, 0, 0, 0, 0, 9], np.uint16)
    assert packed_alone(used, new, "bitmap") == "0902" "0900" "0300" "0900"


@both
def test_dense_bytes_are_the_values(used):
    assert packed_alone(used, np.array([1, 2], np.uint32), "dense") == "0100000002000000"


def packed_alone(used, new, mode) -> str:
    """Payload of a run whose old bits were all 0, as hexadecimal digits."""
    offsets, values, _, blocks, counts = scanned(used, new, np.zeros_like(new), [len(new)])
    out = np.empty(len(encode(new, np.flatnonzero(new), mode=mode)), np.uint8)
    used.pack(np.array([len(new)]), counts, np.array([MODES.index(mode)], np.uint8), new.view(np.uint8), offsets.view(np.uint8),
              values.view(np.uint8), blocks.view(np.uint8), out)
    return out.tobytes().hex()


@both
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(WORDS), lengths_of_runs, st.sampled_from([0.0, 0.01, 1.0]), st.integers(0, 2**32))
def test_what_was_moved_can_be_put_back_and_hashes_like_the_whole(used, word, lengths, density, seed):
    old, new = states(word, lengths, density=density, seed=seed)
    moved = old.copy()
    offsets, values, olds, blocks, _ = scanned(used, new, moved, lengths)
    runs, origins = np.array(lengths), np.array([origin(SEED, 1000 * place) for place in range(len(lengths))])
    change = used.hash_blocks(runs, origins, blocks, offsets, values, olds)
    before, after = (used.hash_runs(runs, origins, bits) for bits in (old, new))
    assert (before + change) % (1 << 64) == after
    assert before == numpy_kernels.hash_runs(runs, origins, old)
    used.put_blocks(moved, runs, blocks, offsets, olds)
    assert np.array_equal(moved, old)
    assert np.array_equal(numpy_kernels.places(runs, blocks, offsets), np.flatnonzero(new != old))


@both
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(WORDS), st.integers(1, 100_000), st.sampled_from([0.001, 0.3]), st.integers(0, 2**32), st.integers(0, 2**40))
def test_hashes_of_places_are_those_of_the_elements_there(used, word, length, density, seed, start):
    old, new = states(word, [length], density=density, seed=seed)
    indices = np.flatnonzero(new != old)
    share = used.hash_change(origin(SEED, start), indices, old[indices], new[indices])
    assert share == (hash_bits(SEED, new, start=start) - hash_bits(SEED, old, start=start)) % (1 << 64)
    assert share == hash_delta(SEED, None, start=start, old=old, new=new)
    everywhere = np.arange(length)
    assert used.hash_places(origin(SEED, start), everywhere, new) == hash_bits(SEED, new, start=start) == hash_at(
        SEED, everywhere, new, start=start)


@both
@pytest.mark.parametrize(("dtype", "values", "place"), [
    ("BF16", [0x3F80, 0x7F7F, 0xFF80, 0x7FC0], 2), ("BF16", [0x3F80, 0x7F7F], None), ("F16", [0x7BFF, 0xFC01], 1),
    ("F32", [0x7F7FFFFF, 0xFF800000], 1), ("F64", [1, 0x7FF8000000000000], 1), ("I64", [0x7FF8000000000000], None), ("BOOL", [1], None)])
def test_the_first_value_that_is_not_finite_is_found(used, dtype, values, place):
    from asyncrl.weights.codec import word_dtype

    assert not_finite_place(np.array(values, word_dtype(dtype)), dtype, used) == place


@both
@pytest.mark.parametrize("byte", range(8))
def test_a_bit_beyond_the_end_is_noticed(used, byte):
    flags = np.array([1 << byte], np.uint8)
    assert used.flag_indices(flags, byte + 1, np.empty(1, np.int64)) is True
    assert used.flag_indices(flags, byte, np.empty(1, np.int64)) is False
    assert used.flag_indices(flags, 8, np.empty(2, np.int64)) is False


@both
@pytest.mark.parametrize(("offsets", "holds"), [([1, 2], True), ([2, 2], False), ([3, 2], False), ([2, 10], False)])
def test_offsets_that_do_not_ascend_inside_are_noticed(used, offsets, holds):
    assert used.block_indices(np.array([2], np.uint32), np.array(offsets, np.uint16), 10, np.empty(2, np.int64)) is holds


@both
def test_read_only_bytes_at_an_odd_address_are_read(used):
    payload = np.frombuffer(b"\xff" + np.array([5, 6], np.uint32).tobytes(), np.uint8)[1:].view(np.uint32)
    memory = np.zeros(4, np.uint32)
    used.put(memory, np.array([1, 3]), payload)
    assert memory.tolist() == [0, 5, 0, 6]


def test_small_work_stays_with_numpy_and_large_work_is_compiled():
    assert kernels.kernels_for(kernels.COMPILED_FROM_ELEMENTS - 1) is numpy_kernels
    assert kernels.kernels_for(kernels.COMPILED_FROM_ELEMENTS) is numba_kernels


SCAN = """
import sys
import numpy as np
sys.modules.update({name: None for name in sys.argv[1:]})
from asyncrl.weights import kernels
from asyncrl.weights.codec import Changes, put
memory, places = np.zeros(1 << 20, np.uint16), np.arange(1 << 20)
put(memory, Changes(places, places.astype(np.uint16)))
assert memory[65535] == 65535
print(kernels.kernels_for(1 << 20).__name__)
"""


def kernels_of_a_process(*missing: str, **environment: str) -> str:
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", SCAN, *missing], env=os.environ | {"PYTHONPATH": root} | environment, timeout=120,
                          check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_numpy_does_it():
    assert kernels_of_a_process("numba") == "asyncrl.weights.numpy_kernels"


@pytest.mark.slow
def test_where_no_cache_can_be_kept_code_is_compiled_for_this_process(tmp_path):
    # a file where numba wants a folder: unlike permissions, that stops root too
    (tmp_path / "file").touch()
    locator = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    assert kernels_of_a_process(**locator, NUMBA_CACHE_DIR=str(tmp_path / "file")) == "asyncrl.weights.numba_kernels"
    assert kernels_of_a_process(**locator, NUMBA_CACHE_DIR="/dev/full/cache") == "asyncrl.weights.numba_kernels"

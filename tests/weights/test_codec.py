import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import BLOCK_ELEMENTS, MODES, Changes, decode, payload_bytes, put, smallest_modes, take, word_dtype
from tests.weights.codec_oracle import encode

DTYPES = {"BF16": np.uint16, "F32": np.uint32, "I64": np.uint64, "BOOL": np.uint8}


def as_bytes(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, np.uint8)


def round_trip(new: np.ndarray, old: np.ndarray, mode: str, dtype: str) -> np.ndarray:
    indices = np.flatnonzero(new != old)
    changes = decode(as_bytes(encode(new, indices, mode=mode)), mode=mode, dtype=dtype, length=len(new), count=len(indices))
    result = old.copy()
    assert np.array_equal(take(result, changes), old[changes.selection])
    put(result, changes)
    return result


def smallest(*, length: int, count: int, itemsize: int) -> tuple[str, int]:
    codes, sizes = smallest_modes(lengths=np.array([length]), counts=np.array([count]), itemsize=itemsize)
    return MODES[codes[0]], sizes[0]


@given(st.data(), st.sampled_from(MODES), st.sampled_from(sorted(DTYPES)), st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
       st.one_of(st.integers(1, 300), st.sampled_from([BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS])))
def test_every_mode_gives_the_new_bits_back(data, mode, dtype, density, length):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    word = DTYPES[dtype]
    old = rng.integers(0, 2, length).astype(word) if dtype == "BOOL" else rng.integers(0, np.iinfo(word).max, length, dtype=word)
    new = np.where(rng.random(length) < density, old ^ word(1), old)
    assert np.array_equal(round_trip(new, old, mode, dtype), new)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changed", [[0], [BLOCK_ELEMENTS - 1], [BLOCK_ELEMENTS], [0, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS + 2]])
def test_changes_on_both_sides_of_a_block_edge_come_back(mode, changed):
    old = np.zeros(BLOCK_ELEMENTS + 3, np.uint16)
    new = old.copy()
    new[changed] = 7
    assert np.array_equal(round_trip(new, old, mode, "BF16"), new)


@pytest.mark.parametrize("mode", ["blk16", "bitmap"])
def test_a_sparse_payload_without_a_change_is_empty(mode):
    assert encode(np.arange(5, dtype=np.uint16), np.empty(0, np.int64), mode=mode) == b""
    changes = decode(as_bytes(b""), mode=mode, dtype="BF16", length=5, count=0)
    assert (len(changes.indices), len(changes.values)) == (0, 0)


@pytest.mark.parametrize(("count", "mode", "size"), [
    (0, "blk16", 0),
    (1, "blk16", 16 * 4 + 2 + 2),
    (60_000, "blk16", 64 + 60_000 * 4),
    (70_000, "bitmap", 125_000 + 70_000 * 2),       # above 6.25% a bit an element costs less than two bytes a change
    (937_500, "dense", 2_000_000),                  # the bitmap needs exactly as much, and dense is quicker to apply
    (1_000_000, "dense", 2_000_000),
])
def test_the_shortest_mode_is_chosen(count, mode, size):
    sizes = {m: payload_bytes(m, length=1_000_000, count=count, itemsize=2) for m in MODES}
    assert smallest(length=1_000_000, count=count, itemsize=2) == (mode, size)
    assert sizes[mode] == min(sizes.values()) == size


@given(st.integers(1, 200_000), st.floats(0, 1), st.sampled_from([1, 2, 4, 8]))
def test_no_payload_is_longer_than_dense(length, density, itemsize):
    count = int(length * density)
    mode, size = smallest(length=length, count=count, itemsize=itemsize)
    assert payload_bytes(mode, length=length, count=count, itemsize=itemsize) == size <= length * itemsize


@given(st.integers(1, 3 * BLOCK_ELEMENTS), st.integers(0, 2**32), st.sampled_from(MODES))
def test_payload_bytes_is_what_encode_makes(length, seed, mode):
    new = np.random.default_rng(seed).integers(0, 3, length, dtype=np.uint16)
    indices = np.flatnonzero(new)
    assert len(encode(new, indices, mode=mode)) == payload_bytes(mode, length=length, count=len(indices), itemsize=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [-1, 1])
def test_a_payload_too_short_or_too_long_is_refused(mode, cut):
    payload = encode(np.arange(100, dtype=np.uint16), np.array([3, 99]), mode=mode)
    damaged = payload[:cut] if cut < 0 else payload + b"\0"
    with pytest.raises(WeightSyncError, match="must have"):
        decode(as_bytes(damaged), mode=mode, dtype="BF16", length=100, count=2)


@pytest.mark.parametrize(("mode", "payload", "message"), [
    ("blk16", "03000000" "0100" "0200" "0000" "0000", "add up to 3"),          # count says 3, two announced
    ("blk16", "02000000" "0200" "0200" "0000" "0000", "ascending"),            # one element twice
    ("blk16", "02000000" "0300" "0200" "0000" "0000", "ascending"),            # descending
    ("blk16", "02000000" "0200" "0a00" "0000" "0000", "ascending"),            # offset 10 of a piece of 10
    ("bitmap", "0100" "0000" "0000", "does not name the 2"),                   # one flag, two announced
    ("bitmap", "0104" "0000" "0000", "ascending elements below 10"),           # flag 10 of a piece of 10
])
def test_a_payload_that_contradicts_itself_is_refused(mode, payload, message):
    with pytest.raises(WeightSyncError, match=message):
        decode(as_bytes(bytes.fromhex(payload)), mode=mode, dtype="BF16", length=10, count=2)


@pytest.mark.parametrize("count", [-1, 11])
def test_a_count_outside_the_piece_is_refused(count):
    with pytest.raises(WeightSyncError, match="cannot have"):
        payload_bytes("dense", length=10, count=count, itemsize=2)


def test_unknown_mode_and_dtype_are_refused():
    with pytest.raises(WeightSyncError, match="zip"):
        payload_bytes("zip", length=10, count=1, itemsize=2)
    with pytest.raises(WeightSyncError, match="F8"):
        word_dtype("F8")


def test_values_decode_from_an_odd_address():
    payload = b"\xff" + encode(np.arange(9, dtype=np.uint32), np.array([2, 8]), mode="bitmap")
    changes = decode(as_bytes(payload)[1:], mode="bitmap", dtype="F32", length=9, count=2)
    assert (changes.indices.tolist(), changes.values.tolist()) == ([2, 8], [2, 8])


def test_places_outside_the_memory_are_our_own_mistake_and_noticed():
    beyond = Changes(np.array([1, 4]), np.array([1, 2], np.uint16))
    for use in (take, put):
        with pytest.raises(AssertionError, match="bounds"):
            use(np.zeros(4, np.uint16), beyond)


@given(st.integers(1_000_000, 2_000_000), st.floats(0.0005, 0.06))
def test_a_change_of_two_bytes_costs_at_most_four_and_a_fifth(length, density):
    count = int(length * density)
    assert smallest(length=length, count=count, itemsize=2)[1] <= 4.2 * count

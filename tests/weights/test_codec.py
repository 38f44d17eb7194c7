import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import BLOCK_ELEMENTS, changed_indices, decode, encode, payload_bytes, smallest_mode, word_dtype
from asyncrl.weights.manifest import Mode

MODES: tuple[Mode, ...] = ("blk16", "bitmap", "dense")
DTYPES = {"BF16": np.uint16, "F32": np.uint32, "I64": np.uint64, "BOOL": np.uint8}


def as_bytes(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, np.uint8)


def round_trip(new: np.ndarray, old: np.ndarray, mode: Mode, dtype: str) -> np.ndarray:
    indices = changed_indices(new, old)
    changes = decode(as_bytes(encode(new, indices, mode=mode)), mode=mode, dtype=dtype, length=len(new), count=len(indices))
    result = old.copy()
    result[changes.selection] = changes.values
    return result


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


def test_bits_are_compared_not_values():
    # 0.0 == -0.0 and NaN != NaN as values; as bits the first pair differs and the second does not
    old = np.array([0.0, np.nan, 1.0], np.float32).view(np.uint32)
    new = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint32)
    assert changed_indices(new, old).tolist() == [0]
    assert round_trip(new, old, "blk16", "F32").tolist() == [0x80000000, 0x7FC00000, 0x3F800000]


def test_blk16_bytes_are_counts_then_offsets_then_values():
    new = np.zeros(BLOCK_ELEMENTS + 4, np.uint16)
    new[[1, 258, BLOCK_ELEMENTS + 3]] = [0x1122, 0x3344, 0x5566]
    payload = encode(new, np.array([1, 258, BLOCK_ELEMENTS + 3]), mode="blk16")
    assert payload.hex() == "02000000" "01000000" "0100" "0201" "0300" "2211" "4433" "6655"


def test_bitmap_bytes_are_flags_lowest_bit_first_then_values():
    new = np.arange(10, dtype=np.uint16)
    payload = encode(new, np.array([0, 3, 9]), mode="bitmap")
    assert payload.hex() == "0902" "0000" "0300" "0900"


def test_dense_bytes_are_the_values():
    assert encode(np.array([1, 2], np.uint32), np.array([1]), mode="dense").hex() == "0100000002000000"


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
    assert smallest_mode(length=1_000_000, count=count, itemsize=2) == mode
    assert sizes[mode] == min(sizes.values()) == size


@given(st.integers(1, 200_000), st.floats(0, 1), st.sampled_from([1, 2, 4, 8]))
def test_no_payload_is_longer_than_dense(length, density, itemsize):
    count = int(length * density)
    mode = smallest_mode(length=length, count=count, itemsize=itemsize)
    assert payload_bytes(mode, length=length, count=count, itemsize=itemsize) <= length * itemsize


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
    ("bitmap", "0100" "0000" "0000", "names 1 elements"),                      # one flag, two announced
    ("bitmap", "0104" "0000" "0000", "ascending ones below 10"),               # flag 10 of a piece of 10
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

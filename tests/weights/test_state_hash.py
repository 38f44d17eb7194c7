import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.weights.state_hash import MODULUS, hash_bits, hash_delta, tensor_seed

SEED = tensor_seed("model.norm.weight", "BF16")
bits16 = st.lists(st.integers(0, 65535), min_size=1, max_size=300).map(lambda values: np.array(values, np.uint16))


def oracle(seed: int, bits: list[int], start: int) -> int:
    total = 0
    for index, value in enumerate(bits, start):
        x = (seed + index * 0x9E3779B97F4A7C15) % MODULUS
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % MODULUS
        total += ((x ^ (x >> 31)) | 1) * (value + 1)
    return total % MODULUS


@given(bits16, st.integers(0, 2**40))
def test_it_is_the_sum_the_docstring_says(bits, start):
    assert hash_bits(SEED, bits, start=start) == oracle(SEED, bits.tolist(), start)


@given(bits16, st.data())
def test_shares_of_disjoint_pieces_add_up(bits, data):
    cut = data.draw(st.integers(0, len(bits)))
    shares = hash_bits(SEED, bits[:cut], start=0) + hash_bits(SEED, bits[cut:], start=cut)
    assert shares % MODULUS == hash_bits(SEED, bits, start=0)


def test_chunks_do_not_show():
    bits = np.random.default_rng(0).integers(0, 65535, 100_001, dtype=np.uint16)
    shares = sum(hash_bits(SEED, bits[low:low + 7001], start=low) for low in range(0, len(bits), 7001))
    assert hash_bits(SEED, bits, start=0) == shares % MODULUS


@given(bits16, st.integers(0, 2**40), st.data())
def test_a_delta_gives_what_hashing_again_gives(old, start, data):
    new = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=len(old), max_size=len(old))), np.uint16)
    indices = np.flatnonzero(new != old)
    updated = hash_bits(SEED, old, start=start) + hash_delta(SEED, indices, start=start, old=old[indices], new=new[indices])
    assert updated % MODULUS == hash_bits(SEED, new, start=start)


@given(bits16, st.data())
def test_any_change_of_one_element_shows(bits, data):
    index = data.draw(st.integers(0, len(bits) - 1))
    changed = bits.copy()
    changed[index] ^= data.draw(st.integers(1, 65535))
    assert hash_bits(SEED, changed, start=0) != hash_bits(SEED, bits, start=0)


def test_position_name_dtype_and_absence_show():
    bits = np.array([1, 2, 0], np.uint16)
    whole = hash_bits(SEED, bits, start=0)
    assert hash_bits(SEED, bits[[1, 0, 2]], start=0) != whole
    assert hash_bits(SEED, bits, start=1) != whole
    assert hash_bits(SEED, bits[:2], start=0) != whole
    assert hash_bits(tensor_seed("model.norm.bias", "BF16"), bits, start=0) != whole
    assert hash_bits(tensor_seed("model.norm.weight", "F16"), bits, start=0) != whole


def test_words_of_64_bits_wrap():
    bits = np.array([2**64 - 1, 5], np.uint64)
    assert hash_bits(SEED, bits, start=3) == oracle(SEED, bits.tolist(), 3)


def test_nothing_hashes_to_nothing():
    assert hash_bits(SEED, np.empty(0, np.uint16), start=0) == 0

"""The numbers of a trace held against one another and against arithmetic done a second time. Needs the JSON alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

LOGPROB_GAP = 1e-5
"""Between two float32 forwards of the same weights, in nats."""
FLOAT32_GAP = 4e-7
"""Relative, between float32 arithmetic and the same in float64: three roundings."""
_GOLDEN, _MODULUS = 0x9E3779B97F4A7C15, 1 << 64


@dataclass(frozen=True, slots=True)
class Check:
    """One number that was computed twice."""

    step: int
    claim: str
    gap: float
    """Absolute, or relative where the claim says so; 0 for what is equal, bit for bit."""
    allowed: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the gap is allowed."""
        return self.gap <= self.allowed


def checks(trace: dict[str, Any]) -> list[Check]:
    """All of them, in order of the steps."""
    steps = {int(number): step for number, step in trace["steps"].items()}
    parts = (_weights, _token, _judgement, _correction, _gradient, _adamw, _delta, _applied)
    return [check for part in parts for check in part(steps, trace["element"])]


def rounded_bits(bits: int) -> int:
    """bfloat16 bits of a float32, by integer arithmetic: half of the grid is added, to an odd value one less than it."""
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def multiplier(tensor: str, flat: int) -> int:
    """m of docs/weight_sync.md, in plain integers."""
    x = (xxhash.xxh3_64_intdigest(f"{tensor}\0BF16".encode()) + flat * _GOLDEN) % _MODULUS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % _MODULUS
    return (x ^ x >> 31) | 1


def bits(number: dict[str, Any]) -> int:
    """Of a traced number; its digits must name them."""
    if len(number["bits"]) == len("0x00000000"):
        assert f"{int(np.float32(number['value']).view(np.uint32)):#010x}" == number["bits"], number
    return int(number["bits"], 16)


def little(text: str) -> int:
    """The integer that bytes such as `46 bd` hold."""
    return int.from_bytes(bytes.fromhex(text), "little")


def equal(step: int, claim: str, *, given: object, expected: object) -> Check:
    """A check without tolerance."""
    return Check(step, claim, gap=float(given != expected))


def relative(given: float, expected: float) -> float:
    """Gap as a share of the expected value."""
    return abs(given - expected) / abs(expected) if expected else abs(given)


def _weights(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    disk, master, anchor, held = (steps[number] for number in range(1, 5))
    yield equal(1, "the bytes, read as a little-endian word, are the bits the rank holds in step 2",
                given=little(disk["bytes"]), expected=bits(master["master"]))
    first, last = master["rows"]
    yield equal(2, "row and local row differ by the rank's first row, which is that of the piece it publishes",
                given=(first <= element["row"] <= last, element["row"] - first), expected=(True, master["local"][0]))
    yield equal(3, "rounding the float32 bits by integer arithmetic gives the published ones, and those are the bytes of the part",
                given=(bits(anchor["bf16"]), little(anchor["bytes"])), expected=(rounded_bits(bits(master["master"])),) * 2)
    share = multiplier(element["tensor"], element["flat"]) * (bits(anchor["bf16"]) + 1) % _MODULUS
    yield equal(3, "the share of the state hash, by the formula in plain integers", given=anchor["contribution"], expected=f"{share:016x}")
    yield equal(4, "the engine's word is the published bits and sixteen zeros",
                given=bits(held["value"]), expected=bits(anchor["bf16"]) << 16)
    yield equal(4, "the engine's whole memory, hashed anew, gives the state hash that was published and acknowledged",
                given=(held["recomputed_hash"], held["state_hash"]), expected=(anchor["state_hash"],) * 2)


def _token(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    sampled = steps[5]
    yield Check(5, "plain transformers, given the model folder rounded to bfloat16, has the same logprob",
                gap=abs(sampled["logprob"]["value"] - sampled["plain_logprob"]["value"]), allowed=LOGPROB_GAP)
    low, high = sampled["interval"]
    draw = float(np.random.default_rng(sampled["seed"]).random())
    yield equal(5, "the draw follows from the seed and lies in the token's slice of that distribution, whose width is its probability",
                given=(sampled["draw"], low <= draw < high, math.isclose(high - low, math.exp(sampled["logprob"]["value"]), rel_tol=1e-5)),
                expected=(draw, True, True))


def _judgement(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    judged, batch = steps[6], steps[7]
    digits = sum(character.isdigit() for character in judged["completion"]) / 3
    yield Check(6, "the reward, counted again", gap=abs(digits - judged["reward"]), allowed=1e-7)
    mean, spread = statistics.fmean(judged["rewards"]), statistics.stdev(judged["rewards"])
    yield Check(6, "(reward − mean) / std, by Python's statistics, is the advantage, relative",
                gap=relative(judged["advantage"]["value"], (judged["reward"] - mean) / (spread + 1e-6)), allowed=FLOAT32_GAP)
    yield equal(7, "the age is the difference of the two versions, and inside the bound",
                given=(batch["staleness"], batch["staleness"] <= batch["max_staleness"]),
                expected=(batch["version"] - steps[5]["policy_version"], True))
    yield equal(7, "both versions' float32 bits round to the published ones",
                given=[bits(batch[name]) for name in ("bf16_0", "bf16_1")],
                expected=[rounded_bits(bits(batch[name])) for name in ("master_0", "master_1")])


def _correction(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    corrected = steps[8]
    yield Check(8, "plain transformers, given the trainer's float32 weights of version 1, has the same proximal logprob",
                gap=abs(corrected["proximal_logprob"]["value"] - corrected["plain_logprob"]["value"]), allowed=LOGPROB_GAP)
    yield equal(8, "the rollout logprob is the engine's of step 5, bit for bit",
                given=bits(corrected["rollout_logprob"]), expected=bits(steps[5]["logprob"]))
    yield Check(8, "age and rounding add up to the log-ratio",
                gap=abs(corrected["age"] + corrected["rounding"] - corrected["log_ratio"]["value"]), allowed=1e-6)
    log_ratio = corrected["proximal_logprob"]["value"] - corrected["rollout_logprob"]["value"]
    yield Check(8, "the weight is min(exp(difference of the two logprobs), 2), relative",
                gap=relative(corrected["weight"]["value"], min(math.exp(log_ratio), corrected["truncate_high"])), allowed=FLOAT32_GAP)


def _gradient(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    seen, weight, advantage = steps[9], steps[8]["weight"]["value"], steps[6]["advantage"]["value"]
    yield equal(9, "r is 1, and the clip did not hold the token",
                given=(seen["ppo_ratio"]["value"], seen["clipped"]), expected=(1.0, False))
    yield Check(9, "the loss is weight · −advantage · r, relative",
                gap=relative(seen["loss"]["value"], -weight * advantage * seen["ppo_ratio"]["value"]), allowed=FLOAT32_GAP)
    yield Check(9, "the token's push is −weight · advantage / tokens times its logprob's derivative, relative",
                gap=relative(seen["share"], -weight * advantage / seen["loss_tokens"] * seen["logprob_gradient"]), allowed=FLOAT32_GAP)
    yield Check(9, "all tokens' pushes, each derivative taken alone in plain transformers, add up to what FSDP2 reduced",
                gap=abs(seen["share"] + seen["others"] - seen["gradient"]["value"]), allowed=1e-6)
    yield Check(9, f"and so do those on the {seen['elements']:,} elements of the rank's rows, at worst",
                gap=seen["largest_gap"], allowed=1e-6)


def _adamw(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    seen = steps[10]
    gradient = seen["clipped_gradient"]["value"]
    yield Check(10, "the clipped gradient is that of step 9 times min(1, limit / norm), relative",
                gap=relative(gradient, steps[9]["gradient"]["value"] * min(1.0, seen["max_grad_norm"] / seen["grad_norm"])),
                allowed=FLOAT32_GAP)
    (first, new_first), (second, new_second), (old, new) = (
        [number["value"] for number in seen[name]] for name in ("first_moment", "second_moment", "master"))
    beta1, beta2 = seen["betas"]
    expected = (beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2)
    yield Check(10, "both moments by hand in float64, relative",
                gap=max(relative(*pair) for pair in zip((new_first, new_second), expected, strict=True)), allowed=FLOAT32_GAP)
    corrected = (new_first / (1 - beta1**seen["update"]), new_second / (1 - beta2**seen["update"]))
    by_hand = old - seen["learning_rate"] * corrected[0] / (math.sqrt(corrected[1]) + seen["eps"])
    yield Check(10, "the new value by AdamW's formula in float64, in units of float32's last place",
                gap=abs(new - by_hand) / float(np.spacing(np.float32(abs(new)))), allowed=1.0)
    yield equal(10, "the old value is that of version 1 in step 7, bit for bit",
                given=bits(seen["master"][0]), expected=bits(steps[7]["master_1"]))


def _delta(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    delta = steps[11]
    old, new = (bits(number) for number in delta["bf16"])
    yield equal(11, "the new bits are the float32 of step 10, rounded by integer arithmetic; they are others, and are the bytes sent",
                given=(new, new != old, little(delta["value_bytes"])), expected=(rounded_bits(bits(steps[10]["master"][1])), True, new))
    place = element["flat"] - delta["start"]
    flags = -(-delta["length"] // 8)
    yield equal(11, "mode, sizes and places follow from the counts: one bit an element, then two bytes a change",
                given=(delta["mode"], delta["bytes"], delta["bitmap_at"], int(delta["bitmap_byte"], 16) >> delta["bitmap_bit"] & 1,
                       delta["value_at"]),
                expected=("bitmap", flags + 2 * delta["count"], place // 8, 1, flags + 2 * delta["ordinal"]))
    factor = multiplier(element["tensor"], element["flat"])
    yield equal(11, "shares of the state hash and their difference, by the formula in plain integers",
                given=[*delta["contribution"], delta["own_change"]],
                expected=[f"{value % _MODULUS:016x}" for value in (factor * (old + 1), factor * (new + 1), factor * (new - old))])
    before, after, own, others = (int(text, 16) for text in (*delta["state_hash"], delta["own_change"], delta["other_changes"]))
    yield equal(11, "with the changes of all others, read from the engine's memory, the sum is the state hash after, modulo 2^64",
                given=(before + own + others) % _MODULUS, expected=after)


def _applied(steps: dict[int, Any], element: dict[str, Any]) -> Iterator[Check]:
    applied, delta = steps[12], steps[11]
    yield equal(12, "the engine's word before and after is the published bits and sixteen zeros",
                given=[bits(number) for number in applied["value"]], expected=[bits(number) << 16 for number in delta["bf16"]])
    yield equal(12, "the engine's whole memory, hashed anew, gives the state hash that was published and acknowledged",
                given=(applied["recomputed_hash"], applied["state_hash"]), expected=(delta["state_hash"][1],) * 2)
    yield Check(12, "plain transformers, given the trainer's weights of version 2 rounded to bfloat16, has the engine's logprob",
                gap=abs(applied["logprob"]["value"] - applied["plain_published_logprob"]["value"]), allowed=LOGPROB_GAP)
    yield equal(12, "it is the same token, written by the new version", given=(applied["token"], applied["policy_version"]),
                expected=(steps[5]["token"], applied["version"]))

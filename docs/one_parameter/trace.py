"""From a recording to the trace of one element and one token: plain numbers, ready for JSON."""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from one_parameter import oracle
from one_parameter.record import BUFFER, MODEL, NEW_TOKENS, SUMS, TENSOR, TRAINER, Applied, Recording, UpdateSeen
from torch import Tensor

from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Rollout
from asyncrl.weights.codec import decode
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.state_hash import MODULUS, hash_bits, hash_delta, tensor_seed

DTYPE = "BF16"
_BASE, _MADE = 1, 2
"""The step that is told trains from version 1, on what version 0 wrote, and makes version 2."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """One token of the batch and one element of TENSOR on the watched rank."""

    rollout: Rollout
    sequence: int
    """In the packed batch."""
    place: int
    """Of the token in its sequence; in the packed batch it is `index`."""
    index: int
    row: int
    column: int
    again: int
    """Which of the recorded requests wrote the same first token to the same prompt under version 2."""
    gradients: np.ndarray
    """[T, rows, columns] ∂ logprob / ∂ TENSOR of the batch's loss tokens, 0 elsewhere; of the whole tensor."""

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return self.rollout.sequences[0].tokens[:self.place].tolist()

    @property
    def token(self) -> int:
        """What was sampled after it."""
        return int(self.rollout.sequences[0].tokens[self.place])


def f32(value: Any) -> dict[str, Any]:
    """A float32 with the shortest digits that name it, and its bits."""
    number = np.float32(value)
    return {"value": float(str(number)), "bits": f"{int(number.view(np.uint32)):#010x}"}


def bf16(bits: Any) -> dict[str, Any]:
    """A bfloat16 by its bits, with its exact value."""
    return {"value": float((np.uint32(bits) << np.uint32(16)).view(np.float32)), "bits": f"{int(bits):#06x}"}


def published(applied: Applied, name: str = TENSOR) -> np.ndarray:
    """What the engine holds after an update, as bfloat16 bits: the upper half of its float32 memory."""
    return (applied.after[name] >> np.uint32(16)).astype(np.uint16)


def make_trace(recording: Recording) -> dict[str, Any]:
    """The trace of the most telling token and element of a recording."""
    chosen = choose(recording)
    makers = (_disk, _master, _published, _held, _sampled, _judged, _batch, _corrected, _gradient, _update, _delta, _applied)
    return {"made_with": {"cpu": platform.machine()} | {name: version(name) for name in ("torch", "transformers")},
            "run": {"model": MODEL, "sums": SUMS, "buffer": BUFFER, "trainer": TRAINER, "new_tokens": NEW_TOKENS},
            "element": {"tensor": TENSOR, "shape": list(recording.shards[0].shape), "row": chosen.row, "column": chosen.column,
                        "flat": _flat(recording, chosen)},
            "steps": {str(number): make(recording, chosen) for number, make in enumerate(makers, start=1)}}


def choose(recording: Recording) -> Chosen:
    """The first token of a rollout whose weight is furthest from 1, among those that version 2 wrote again to the same prompt.

    The element: where that token's gradient is largest, among those whose published bits stayed in version 1 and changed in version 2.
    """
    packed, (batch, corrected) = recording.batches[_BASE], recording.corrections[_BASE]
    again = {(tuple(request.tokens.tolist()), int(chunk.tokens[0])): number for number, (request, chunk) in enumerate(recording.requests)
             if chunk.policy_version == _MADE}
    candidates = []
    for number, (start, end) in enumerate(itertools.pairwise(packed.cu_seqlens.tolist())):
        place = int(np.flatnonzero(packed.loss_mask[start:end])[0])
        key = (tuple(packed.tokens[start:start + place].tolist()), int(packed.tokens[start + place]))
        if key in again and float(batch.advantages[start + place]) != 0.0:
            candidates.append((abs(float(corrected.weights[start + place].log())), number, place, again[key]))
    _, number, place, request = max(candidates)
    index = int(packed.cu_seqlens[number]) + place
    gradients = _gradients(recording)
    rows, columns = _rows(recording), recording.shards[0].shape[1]
    bits = [published(applied).reshape(-1, columns) for applied in recording.applied]
    telling = (bits[0] == bits[1]) & (bits[1] != bits[2])
    size = np.where(telling, np.abs(gradients[index]), -1.0)[rows.start:rows.stop]
    row, column = divmod(int(size.argmax()), columns)
    return Chosen(recording.reports[_BASE].batch.rollouts[int(packed.rollout_ids[number])], sequence=number, place=place, index=index,
                  row=rows.start + row, column=column, again=request, gradients=gradients)


def _gradients(recording: Recording) -> np.ndarray:
    packed = recording.batches[_BASE]
    model = oracle.load(recording.exports[_BASE])
    found = np.zeros((len(packed.tokens), *recording.shards[0].shape), np.float64)
    for start, end in itertools.pairwise(packed.cu_seqlens.tolist()):
        places = np.flatnonzero(packed.loss_mask[start:end])
        each = oracle.logprob_gradients(model, packed.tokens[start:end].tolist(), places=places.tolist(), weight=TENSOR)
        found[start + places] = [gradient.double().numpy() for gradient in each]
    return found


def _rows(recording: Recording) -> range:
    """Of TENSOR, on the watched rank, the last one: its entry in the anchor."""
    entry = [entry for entry in recording.applied[0].manifest.tensors if entry.name == TENSOR][-1]
    return range(entry.start // entry.shape[1], (entry.start + entry.length) // entry.shape[1])


def _flat(recording: Recording, chosen: Chosen) -> int:
    return chosen.row * recording.shards[0].shape[1] + chosen.column


def _here(recording: Recording, chosen: Chosen, shard: Tensor) -> float:
    """The element in the watched rank's shard."""
    return float(shard[chosen.row - _rows(recording).start, chosen.column])


def _entry(applied: Applied, flat: int) -> TensorEntry:
    return next(entry for entry in applied.manifest.tensors
                if entry.name == TENSOR and entry.start <= flat < entry.start + entry.length)


def _contribution(recording: Recording, chosen: Chosen, applied: Applied) -> int:
    flat = _flat(recording, chosen)
    return hash_bits(tensor_seed(TENSOR, DTYPE), published(applied)[flat:flat + 1], start=flat)


def _disk(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    file = recording.model / "model.safetensors"
    raw = file.read_bytes()
    head = int.from_bytes(raw[:8], "little")
    described = json.loads(raw[8:8 + head])[TENSOR]
    offset = 8 + head + described["data_offsets"][0] + 4 * _flat(recording, chosen)
    return {"file": file.name, "dtype": described["dtype"], "offset": offset, "bytes": raw[offset:offset + 4].hex(" ")}


def _master(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    rows, shard = _rows(recording), recording.shards[0]
    return {"rank": TRAINER["processes"] - 1, "ranks": TRAINER["processes"], "placements": str(shard.placements),
            "rows": [rows.start, rows.stop - 1], "local": [chosen.row - rows.start, chosen.column],
            "master": f32(_here(recording, chosen, recording.updates[0].master[0]))}


def _published(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    anchor = recording.applied[0]
    flat = _flat(recording, chosen)
    entry = _entry(anchor, flat)
    at = entry.offset + 2 * (flat - entry.start)
    return {"version": anchor.manifest.version, "bf16": bf16(published(anchor)[flat]), "mode": entry.mode,
            "part": Path(anchor.manifest.parts[entry.part].path).name, "offset": at,
            "bytes": anchor.parts[entry.part][at:at + 2].tobytes().hex(" "),
            "contribution": f"{_contribution(recording, chosen, anchor):016x}",
            "state_hash": f"{anchor.manifest.state_hash:016x}", "elements": sum(each.length for each in anchor.manifest.tensors)}


def _held(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    anchor = recording.applied[0]
    return {"dtype": "float32", "value": f32(anchor.after[TENSOR][_flat(recording, chosen):][:1].view(np.float32)[0]),
            "version": anchor.ack.version, "state_hash": f"{anchor.ack.state_hash:016x}", "recomputed_hash": _memory_hash(anchor)}


def _memory_hash(applied: Applied) -> str:
    total = sum(hash_bits(tensor_seed(name, DTYPE), published(applied, name), start=0) for name in applied.after)
    return f"{total % MODULUS:016x}"


def _sampled(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    rollout, sequence = chosen.rollout, chosen.rollout.sequences[0]
    name = f"{rollout.group_id}.{rollout.index}.0.0"
    (request,) = [request for request, _ in recording.requests if request.request_id == name]
    logprobs = oracle.next_logprobs(oracle.load(recording.model, published=True), chosen.tokens)
    edges = np.concatenate([[0.0], logprobs.double().exp().cumsum(0).numpy()])
    decode_tokens = Tokenizer(recording.model).decode
    return {"request": name, "prompt": decode_tokens(chosen.tokens), "token": chosen.token, "text": decode_tokens([chosen.token]),
            "policy_version": int(sequence.policy_versions[chosen.place]), "logprob": f32(sequence.rollout_logprobs[chosen.place]),
            "probability": math.exp(sequence.rollout_logprobs[chosen.place]),
            "seed": request.seed, "draw": float(np.random.default_rng(request.seed).random()),
            "interval": [float(edges[chosen.token] / edges[-1]), float(edges[chosen.token + 1] / edges[-1])],
            "plain_logprob": f32(logprobs[chosen.token])}


def _judged(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    (group,) = [group for group in recording.reports[_BASE].batch.groups if group.group_id == chosen.rollout.group_id]
    written = chosen.rollout.sequences[0].tokens[chosen.place:].tolist()
    rewards = [f32(rollout.reward)["value"] for rollout in group.rollouts]
    return {"completion": Tokenizer(recording.model).decode(written), "group": group.group_id, "index": chosen.rollout.index,
            "reward": rewards[chosen.rollout.index], "rewards": rewards,
            "mean": statistics.fmean(rewards), "std": statistics.stdev(rewards),
            "advantage": f32(recording.corrections[_BASE][0].advantages[chosen.index])}


def _batch(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    packed = recording.batches[_BASE]
    written = int(packed.policy_versions[chosen.index])
    first, second = (recording.updates[number].master[0] for number in (0, _BASE))
    flat = _flat(recording, chosen)
    return {"version": packed.version, "policy_version": written, "staleness": packed.version - written,
            "max_staleness": BUFFER["max_staleness"], "rollouts": len(packed.rewards), "tokens": len(packed.tokens),
            "loss_tokens": packed.num_loss_tokens, "sequence": chosen.sequence, "index": chosen.index,
            "master_0": f32(_here(recording, chosen, first)), "master_1": f32(_here(recording, chosen, second)),
            "bf16_0": bf16(published(recording.applied[0])[flat]), "bf16_1": bf16(published(recording.applied[1])[flat])}


def _corrected(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    batch, corrected = recording.corrections[_BASE]
    t, mask = chosen.index, batch.loss_mask
    folder = recording.exports[_BASE]
    plain, rounded = (float(oracle.next_logprobs(oracle.load(folder, published=published), chosen.tokens)[chosen.token])
                      for published in (False, True))
    log_ratio = batch.proximal_logprobs - batch.rollout_logprobs
    cap = recording.settings.correction.truncate_high
    return {"rollout_logprob": f32(batch.rollout_logprobs[t]), "proximal_logprob": f32(batch.proximal_logprobs[t]),
            "age": rounded - float(batch.rollout_logprobs[t]), "rounding": float(batch.proximal_logprobs[t]) - rounded,
            "plain_logprob": f32(plain), "plain_published_logprob": f32(rounded), "log_ratio": f32(log_ratio[t]),
            "ratio": f32(log_ratio[t].exp()), "truncate_high": cap, "weight": f32(corrected.weights[t]),
            "truncated": int((log_ratio[mask].exp() > cap).sum()), "largest_ratio": f32(log_ratio[mask].exp().max())}


def _gradient(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    (batch, corrected), seen = recording.corrections[_BASE], recording.updates[_BASE]
    count, traces = int(batch.loss_mask.sum()), recording.traces[_BASE]
    factors = (-corrected.weights * batch.advantages).double().numpy() * batch.loss_mask.numpy() / count
    shares = factors * chosen.gradients[:, chosen.row, chosen.column]
    rows = _rows(recording)
    whole = np.tensordot(factors, chosen.gradients[:, rows.start:rows.stop], axes=1)
    return {"ppo_ratio": f32(traces.log_ratio[chosen.index].exp()), "clipped": bool(traces.clipped[chosen.index]),
            "loss": f32(traces.losses[chosen.index]), "loss_tokens": count,
            "logprob_gradient": float(chosen.gradients[chosen.index, chosen.row, chosen.column]),
            "share": float(shares[chosen.index]), "others": float(shares.sum() - shares[chosen.index]),
            "gradient": f32(_here(recording, chosen, seen.gradient)),
            "largest_gap": float(np.abs(whole - seen.gradient.double().numpy()).max()), "elements": whole.size}


def _update(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    seen: UpdateSeen = recording.updates[_BASE]
    pairs = {"first_moment": seen.first_moment, "second_moment": seen.second_moment, "master": seen.master}
    settings = recording.settings.trainer
    return {"grad_norm": seen.update.grad_norm, "max_grad_norm": settings.max_grad_norm,
            "factor": min(1.0, settings.max_grad_norm / seen.update.grad_norm),
            "clipped_gradient": f32(_here(recording, chosen, seen.clipped_gradient)), "learning_rate": seen.learning_rate,
            "betas": list(settings.betas), "eps": settings.eps, "update": seen.number,
            **{name: [f32(_here(recording, chosen, shard)) for shard in pair] for name, pair in pairs.items()}}


def _delta(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    flat, (base, made) = _flat(recording, chosen), recording.applied[_BASE:_MADE + 1]
    entry = _entry(made, flat)
    payload = made.parts[entry.part][entry.offset:entry.offset + entry.bytes]
    changes = decode(payload, mode=entry.mode, dtype=entry.dtype, length=entry.length, count=entry.count)
    indices = np.arange(entry.length) if changes.indices is None else changes.indices
    (ordinal,) = np.flatnonzero(indices == flat - entry.start).tolist()
    value_at = entry.bytes - 2 * (len(indices) - ordinal)
    old, new = (published(applied)[flat:flat + 1] for applied in (base, made))
    own = hash_delta(tensor_seed(TENSOR, DTYPE), np.zeros(1, np.int64), start=flat, old=old, new=new)
    part = made.manifest.parts[entry.part]
    return {"version": made.manifest.version, "base": made.manifest.base, "bf16": [bf16(old[0]), bf16(new[0])], "mode": entry.mode,
            "part": Path(part.path).name, "part_bytes": part.bytes, "payload_bytes": made.manifest.payload_bytes,
            "anchor_bytes": recording.applied[0].manifest.payload_bytes, "density": made.manifest.density, "offset": entry.offset,
            "bytes": entry.bytes, "start": entry.start, "length": entry.length, "count": entry.count, "ordinal": ordinal,
            "bitmap_at": (flat - entry.start) // 8, "bitmap_bit": (flat - entry.start) % 8,
            "bitmap_byte": f"{int(payload[(flat - entry.start) // 8]):#04x}", "value_at": value_at,
            "value_bytes": payload[value_at:value_at + 2].tobytes().hex(" "),
            "state_hash": [f"{applied.manifest.state_hash:016x}" for applied in (base, made)],
            "contribution": [f"{_contribution(recording, chosen, applied):016x}" for applied in (base, made)],
            "own_change": f"{own:016x}", "other_changes": f"{(_all_changes(base, made) - own) % MODULUS:016x}",
            "changed": sum(each.count for each in made.manifest.tensors)}


def _all_changes(base: Applied, made: Applied) -> int:
    total = 0
    for name in made.after:
        old, new = published(base, name), published(made, name)
        changed = np.flatnonzero(old != new)
        total += hash_delta(tensor_seed(name, DTYPE), changed, start=0, old=old[changed], new=new[changed])
    return total


def _applied(recording: Recording, chosen: Chosen) -> dict[str, Any]:
    flat, made = _flat(recording, chosen), recording.applied[_MADE]
    request, chunk = recording.requests[chosen.again]
    plain, rounded = (float(oracle.next_logprobs(oracle.load(recording.exports[_MADE], published=published), chosen.tokens)[chosen.token])
                      for published in (False, True))
    return {"value": [f32(memory[TENSOR][flat:flat + 1].view(np.float32)[0]) for memory in (made.before, made.after)],
            "version": made.ack.version, "state_hash": f"{made.ack.state_hash:016x}", "recomputed_hash": _memory_hash(made),
            "request": request.request_id, "policy_version": chunk.policy_version, "token": int(chunk.tokens[0]),
            "logprob": f32(chunk.logprobs[0]), "probability": math.exp(chunk.logprobs[0]), "plain_published_logprob": f32(rounded),
            "plain_logprob": f32(plain)}

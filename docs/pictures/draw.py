"""The pictures of docs/concepts.md: `python docs/pictures/draw.py [FOLDER]` writes them, beside itself when no folder is named.

Every number in them comes from the library: the real buffer, router, worker and ledger with a scripted engine on a virtual clock, the
real correction and loss, a real publisher and receiver. The numbers stand in the description of each SVG too, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from miniature import Miniature, Script, TimedEngine

from asyncrl.accounting import Ledger, RolloutKey
from asyncrl.buffer.policies import Lease
from asyncrl.clock import now_s, run_virtual
from asyncrl.correction import CorrectionBatch, LossInputs, correct, preset
from asyncrl.correction.losses import decoupled_ppo
from asyncrl.errors import RewardError
from asyncrl.rollout.engine import GenerationRequest, Interruption
from asyncrl.rollout.env import Session
from asyncrl.rollout.fake_engine import fake_manifest
from asyncrl.rollout.router import Router
from asyncrl.types import Sampling
from asyncrl.weights.manifest import Piece, merge
from asyncrl.weights.piece_bits import ArrayBits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import memory_targets

VERSIONS = ("#4477aa", "#ee8866", "#228833", "#aa4499", "#bbaa22", "#66ccee")
"""A colour each for what version 0, 1, 2 … wrote; in all pictures the same."""
INK, DARK, PALE, GRID, WARN, GENERATING = "#222222", "#555555", "#dddddd", "#cccccc", "#cc3311", "#bbccdd"
WIDTH_IN = 8.0
STYLE = {"svg.hashsalt": "asyncrl", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK,
         "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": DARK, "hatch.linewidth": 0.7}


# Staleness -------------------------------------------------------------------------------------------------------------------


STALENESS: dict[str, Any] = {"groups_per_step": 4, "group_size": 1, "max_staleness": 2, "window": 2, "zero_variance": "keep"}


def staleness_script() -> Script:
    """Rollouts of four to eight tokens, and one of 22."""
    return Script(tokens=lambda key: 22 if key[0] == 7 else 4 + key[0] * 3 % 5, reward=lambda key: 1.0, step_s=7.0, apply_s=2.0,
                  until_s=48.0)


def staleness_data() -> dict[str, Any]:
    """Groups of one rollout under K = 2, P = 4, W = 2: when each was written, by which version, trained and let go."""
    script = staleness_script()
    run = run_virtual(Miniature(script, **STALENESS).play())
    lease = Lease(**{name: STALENESS[name] for name in ("groups_per_step", "max_staleness", "window")})
    lives = {group: vars(life) | {"staleness": None if life.version is None else life.version - min(version for _, version in life.tokens)}
             for group, life in run.lives.items()}
    return {"capacity": lease.capacity_groups, "updates": run.updates, "groups": lives, "until_s": script.until_s}


def draw_staleness(figure: Figure, data: dict[str, Any]) -> None:
    """A row a group, and below it what the slots are held for."""
    figure.set_size_inches(WIDTH_IN, 6.9)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4.6, 1.2))
    for group, life in data["groups"].items():
        _draw_life(top, int(group), life, until_s=data["until_s"])
    for began, ended in data["updates"]:
        top.axvspan(began, ended, color="#eeeeee", zorder=0)
    top.set(ylabel="group, in order of admission", ylim=(len(data["groups"]) - 0.4, -0.6), yticks=range(0, len(data["groups"]), 4))
    times = np.arange(0, data["until_s"] + 0.5, 0.5)
    kinds = (("admitted", "done", GENERATING, ""), ("done", "taken", PALE, ""), ("taken", "trained", DARK, ""),
             ("trained", "freed", "white", "//////"))
    below = np.zeros(len(times))
    for begins, ends, colour, hatch in kinds:
        lives = [(life[begins], life[ends]) for life in data["groups"].values() if life[begins] is not None]
        height = sum(((times >= began) & (times < (data["until_s"] if ended is None else ended))).astype(float) for began, ended in lives)
        bottom.fill_between(times, below, below + height, step="post", facecolor=colour, hatch=hatch, edgecolor=DARK if hatch else colour,
                            linewidth=0)
        below = below + height
    bottom.axhline(data["capacity"], color=WARN, linewidth=1.2)
    bottom.text(data["until_s"] - 0.3, data["capacity"] + 0.6, f"B = {data['capacity']}", color=WARN, ha="right")
    bottom.set(xlabel="seconds", ylabel="slots held", ylim=(0, 14.9), yticks=(0, 4, 8, 11), xlim=(0, data["until_s"]))
    shown = [top.barh(0, 0, color=VERSIONS[version], label=f"written by version {version}") for version in range(5)]
    shown += [top.barh(0, 0, color=PALE, label="whole, waits"), top.barh(0, 0, color=DARK, label="trained on; its staleness"),
              top.barh(0, 0, facecolor="white", edgecolor=DARK, hatch="//////", label="trained; engine lacks it"),
              top.barh(0, 0, color=GENERATING, label="being written (below)")]
    figure.legend(handles=shown, loc="outside upper center", ncols=4, frameon=False, handlelength=1.4, columnspacing=1.2, fontsize=8.5)


def _draw_life(axes: Axes, row: int, life: dict[str, Any], *, until_s: float) -> None:
    until = until_s if life["done"] is None else life["done"]
    axes.barh(row, until - life["admitted"], left=life["admitted"], height=0.72, facecolor="white", edgecolor=GRID, linewidth=0.6)
    for version, times in itertools.groupby(life["tokens"], key=lambda token: token[1]):
        for time, _ in times:
            axes.barh(row, 0.94, left=time - 0.94, height=0.72, color=VERSIONS[version])
    if life["done"] is None:
        return
    taken, trained = life["taken"] or until_s, life["trained"] or until_s
    axes.barh(row, taken - life["done"], left=life["done"], height=0.72, color=PALE)
    if life["taken"] is None:
        return
    axes.barh(row, trained - taken, left=taken, height=0.72, color=DARK)
    axes.text((taken + trained) / 2, row + 0.02, str(life["staleness"]), color="white", ha="center", va="center", fontsize=8, weight="bold")
    if life["trained"] is not None:
        axes.barh(row, (life["freed"] or until_s) - trained, left=trained, height=0.72, facecolor="white", edgecolor=DARK, hatch="//////",
                  linewidth=0.6)


# The three logprobs ----------------------------------------------------------------------------------------------------------

TOKENS = (("as it mostly is", -1.20, -1.05, -1.00), ("unlikely when it was sampled", -2.40, -1.20, -1.15),
          ("moved far in this step", -0.90, -0.80, -0.45))
"""What it shows, rollout, proximal, current."""
COLUMNS = ("rollout", "proximal", "current", "ratio", "w", "r", "loss", "gradient")


def logprobs_data() -> dict[str, Any]:
    """Three tokens of advantage 1 through the real correction and the real loss."""
    rollout, proximal, current = (torch.tensor(column) for column in list(zip(*TOKENS, strict=True))[1:])
    current.requires_grad_()
    count, ones = len(TOKENS), torch.ones(len(TOKENS))
    batch = CorrectionBatch(rollout_logprobs=rollout, proximal_logprobs=proximal, advantages=ones, loss_mask=ones.bool(),
                            turn_ids=torch.zeros(count, dtype=torch.int16), policy_versions=torch.full((count,), 5, dtype=torch.int32),
                            cu_seqlens=torch.tensor([0, count]), group_ids=torch.tensor([0]), version=7)
    corrected = correct(batch, preset("token_tis"))
    losses = decoupled_ppo(current, inputs=LossInputs.of(batch, corrected)).losses
    losses.sum().backward()
    columns = (rollout, proximal, current, (proximal - rollout).exp(), corrected.weights, (current - proximal).exp(), losses, current.grad)
    return {name: [round(value, 2) + 0.0 for value in column.detach().tolist()] for name, column in zip(COLUMNS, columns, strict=True)}


def draw_logprobs(figure: Figure, data: dict[str, Any]) -> None:
    """Who computes which logprob, when, and what is made of each pair; below it three tokens in numbers."""
    figure.set_size_inches(WIDTH_IN, 4.9)
    axes = _canvas(figure, height=4.9)
    boxes = ((0.1, VERSIONS[0], "rollout_logprobs", "the engine, as it samples\nversion that wrote the token: 5\nfrozen"),
             (2.85, VERSIONS[2], "proximal_logprobs", "the trainer, before the step\nversion the step trains from: 7\nfrozen"),
             (5.6, VERSIONS[1], "logprobs", "the trainer, in each update\ncurrent weights, on the way to 8\nwith gradient"))
    for left, colour, name, text in boxes:
        _box(axes, left, 3.55, width=2.3, height=1.2, colour=colour, title=name, text=text)
    for left, title, text in ((1.25, "ratio = proximal / rollout", "w = min(ratio, 2): once a step, frozen\nstaleness and mismatch"),
                              (4.0, "r = current / proximal", "clipped to [0.8, 1.28], has the gradient\nhow far this step has moved")):
        axes.plot([left + 0.15, left + 0.15, left + 2.6, left + 2.6], [3.5, 3.38, 3.38, 3.5], color=DARK, linewidth=1.2)
        axes.text(left + 1.37, 3.26, title, ha="center", va="top", weight="bold")
        axes.text(left + 1.37, 3.02, text, ha="center", va="top", color=DARK, fontsize=8.5)
    axes.text(4.0, 2.22, r"loss = w · max(−A · r, −A · clip(r, 0.8, 1.28))", ha="center", fontsize=11)
    heads = ("a token of advantage 1", "rollout", "proximal", "current", "ratio", "w", "r", "loss", "∂loss/∂logp")
    places = (0.1, 2.7, 3.5, 4.25, 4.9, 5.45, 6.0, 6.65, 7.85)
    axes.plot([0.1, 7.9], [1.58, 1.58], color=GRID, linewidth=1)
    for place, head in zip(places, heads, strict=True):
        axes.text(place, 1.68, head, ha="left" if place == 0.1 else "right", weight="bold", fontsize=8.5)
    for row, (name, *_) in enumerate(TOKENS):
        axes.text(places[0], 1.28 - 0.32 * row, name)
        for place, column in zip(places[1:], COLUMNS, strict=True):
            value = data[column][row]
            is_bounded = (column == "w" and value != data["ratio"][row]) or (column == "gradient" and value == 0)
            axes.text(place, 1.28 - 0.32 * row, f"{value:.2f}".replace("-", "−"), ha="right", color=WARN if is_bounded else INK)
    axes.text(0.1, 0.12, "red: where a bound acts. The second token pushes with weight 2 instead of 3.32, the third not at all.",
              color=DARK)


# Interruption ----------------------------------------------------------------------------------------------------------------


def interruption_data() -> dict[str, Any]:
    """The same three requests under each kind of interruption; weights come 6.5 s after the first and take 2 s."""
    return {kind.value: run_virtual(_interrupted(kind)) for kind in (Interruption.KEEP, Interruption.RECOMPUTE, Interruption.DRAIN)}


async def _interrupted(kind: Interruption) -> dict[str, Any]:
    written: dict[int, list[float]] = defaultdict(list)

    def write(request: GenerationRequest, index: int, version: int) -> tuple[int, float]:
        written[int(request.request_id.split(".")[0])].append(round(now_s() - began_s, 3))
        return 2, -1.0

    router = Router([TimedEngine(write, apply_s=2.0)])
    await router.update(fake_manifest(0), Interruption.KEEP)
    began_s = now_s()

    async def request(number: int, *, at_s: float, tokens: int) -> Session:
        await asyncio.sleep(at_s)
        session = Session(router, key=(number, 0, 0), seed=0, sampling=Sampling(max_new_tokens=tokens), ledger=Ledger())
        await session.generate((2,) * 4)
        return session

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(request(number, at_s=at_s, tokens=tokens))
                   for number, (at_s, tokens) in enumerate(((0.0, 14), (2.0, 7), (6.0, 8)))]
        await asyncio.sleep(6.5)
        ack = (await router.update(fake_manifest(1, base=0), kind)).acks["engine"]
        resumed_s = round(now_s() - began_s, 3)
    spans = [[[span.start - 4, span.end - 4, span.policy_version, span.kv_fresh] for span in (await task).sequences()[0].spans]
             for task in running]
    return {"spans": spans, "times": [written[number] for number in range(3)], "update": [6.5, resumed_s],
            "recomputed": ack.recomputed_tokens}


def draw_interruption(figure: Figure, data: dict[str, Any]) -> None:
    """A panel a kind, a row a request, a square a token."""
    figure.set_size_inches(WIDTH_IN, 5.2)
    said = {"keep": "go on, with the keys and values they have", "recompute": "go on, keys and values computed again",
            "drain": "finish first; one that has no token yet waits"}
    for axes, kind in zip(figure.subplots(3, 1, sharex=True), said, strict=True):
        seen = data[kind]
        began, ended = seen["update"]
        axes.axvspan(began, ended, color="#eeeeee", zorder=0)
        for row, (spans, times) in enumerate(zip(seen["spans"], seen["times"], strict=True)):
            for start, end, version, kv_fresh in spans:
                for time in times[start:end]:
                    axes.barh(row, 0.86, left=time - 0.93, height=0.62, facecolor=VERSIONS[version], edgecolor="white",
                              hatch="" if kv_fresh else "xxxx", linewidth=0)
        recomputed = f"; {seen['recomputed']} tokens of cache made anew" if seen["recomputed"] else ""
        axes.set_title(f"{kind}: running requests {said[kind]}{recomputed}", loc="left", fontsize=9.5, weight="bold")
        axes.set(yticks=range(3), yticklabels=("A", "B", "C"), ylim=(2.6, -0.6), xlim=(0, 25))
        axes.text((began + ended) / 2, 2.5, "update", ha="center", va="bottom", color=DARK, fontsize=8)
    axes.set_xlabel("seconds; the weights of version 1 arrive at 6.5")
    shown = [axes.barh(0, 0, color=VERSIONS[0], label="version 0"), axes.barh(0, 0, color=VERSIONS[1], label="version 1, kv_fresh"),
             axes.barh(0, 0, facecolor=VERSIONS[1], edgecolor="white", hatch="xxxx", label="version 1 over keys and values of version 0")]
    figure.legend(handles=shown, loc="outside upper center", ncols=3, frameon=False, handlelength=1.6)


# Weight sync -----------------------------------------------------------------------------------------------------------------

CHANGED = (1.0, 0.01, 0.04, 0.3, 0.97)
"""Share of the elements that the step before each version changed."""
ELEMENTS = 1 << 16


def weight_sync_data() -> dict[str, Any]:
    """A tensor of 65,536 bfloat16 elements, published whole and then by what changed, and what the receiver has afterwards."""
    piece = Piece(name="weight", dtype="BF16", shape=(256, 256), start=0, length=ELEMENTS)
    bits = (np.arange(ELEMENTS) * 40503 % ELEMENTS % 16000).astype(np.uint16)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        store = StoreTransport(Path(root))
        publisher = Publisher([piece], rank=0, sink=store)
        receiver = Receiver(memory_targets({"weight": torch.zeros(256, 256, dtype=torch.bfloat16)}), source=store)
        for version, share in enumerate(CHANGED):
            base = version - 1 if version else None
            changed = (np.arange(ELEMENTS) * 40503 % ELEMENTS < share * ELEMENTS) & (base is not None)
            bits = np.where(changed, bits ^ np.uint16(1 << version), bits)
            publication = publisher.publish(ArrayBits([(piece, bits)]), version=version, base=base)
            manifest = merge([publication], run_epoch=0, version=version, base=base)
            store.commit(manifest)
            publisher.committed(version)
            (entry,) = manifest.tensors
            rows.append({"version": version, "base": base, "changed": entry.count / ELEMENTS, "mode": entry.mode,
                         "bytes": manifest.payload_bytes, "published_hash": f"{manifest.state_hash:016x}",
                         "received_hash": f"{receiver.apply(manifest):016x}"})
    return {"rows": rows}


def draw_weight_sync(figure: Figure, data: dict[str, Any]) -> None:
    """The way of one version, and a chain of versions in numbers."""
    figure.set_size_inches(WIDTH_IN, 5.25)
    axes = _canvas(figure, height=5.25)
    lanes = ((4.85, "trainer"), (3.95, "store"), (3.05, "engine"), (2.15, "buffer"))
    for height, name in lanes:
        axes.plot([0.75, 7.95], [height, height], color=GRID, linewidth=1, zorder=0)
        axes.text(0.08, height, name, va="center", weight="bold")
    stations = ((0.85, 1.0, 4.85, "step makes\nversion v"), (1.95, 1.0, 4.85, "compare with\nthe snapshot"),
                (4.3, 0.9, 4.85, "snapshot\nis v"), (5.3, 2.65, 4.85, "the next step, as soon as it has a batch"),
                (3.0, 1.15, 3.95, "parts,\nthen manifest"), (0.85, 2.8, 3.05, "samples with version v − 1"),
                (6.95, 1.0, 3.05, "samples with\nversion v"), (0.85, 5.7, 2.15, "slots of the batch are held"), (6.95, 1.0, 2.15, "free"))
    paused = ((3.72, 0.66, 3.05, "pause"), (4.44, 0.66, 3.05, "verify"), (5.16, 0.9, 3.05, "write,\nread back"),
              (6.12, 0.74, 3.05, "resume"))
    for left, width, height, text in (*stations, *paused):
        is_paused = (left, width, height, text) in paused
        axes.add_patch(FancyBboxPatch((left, height - 0.24), width, 0.48, boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.2,
                                      facecolor="#fdeee7" if is_paused else "white", edgecolor=VERSIONS[1] if is_paused else VERSIONS[0]))
        axes.text(left + width / 2, height, text, ha="center", va="center", fontsize=8)
    for start, end in (((2.6, 4.59), (3.2, 4.21)), ((3.85, 4.21), (4.5, 4.59)), ((4.0, 3.7), (4.7, 3.31)), ((6.6, 2.79), (7.1, 2.41))):
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": DARK})
    axes.text(4.95, 3.55, "order, names, shapes, checksums,\nthe state hash that would result", color=DARK, fontsize=8, va="center")
    axes.text(6.45, 2.58, "acknowledged: version, state hash", color=DARK, fontsize=8, ha="right")
    heads = ((0.08, "version"), (0.95, "base"), (1.6, "changed"), (2.45, "sent as"), (3.3, "bytes"), (5.3, "state hash, trainer = engine"))
    for place, head in heads:
        axes.text(place, 1.6, head, weight="bold", fontsize=8.5)
    axes.plot([0.08, 7.95], [1.52, 1.52], color=GRID, linewidth=1)
    for number, row in enumerate(data["rows"]):
        height = 1.28 - 0.28 * number
        cells = (str(row["version"]), "anchor" if row["base"] is None else str(row["base"]), f"{row['changed']:.0%}", row["mode"])
        for (place, _), cell in zip(heads, cells, strict=False):
            axes.text(place, height, cell, va="center")
        axes.barh(height, 1.0 * row["bytes"] / data["rows"][0]["bytes"], left=3.95, height=0.16, color=VERSIONS[0])
        axes.text(3.88, height, f"{row['bytes']:,}", va="center", ha="right")
        equal = "=" if row["published_hash"] == row["received_hash"] else "≠"
        hashes = f"{row['published_hash'][:10]}… {equal} {row['received_hash'][:10]}…"
        axes.text(5.3, height, hashes, va="center", family="monospace", fontsize=8)


# The ledger ------------------------------------------------------------------------------------------------------------------


def ledger_data() -> dict[str, Any]:
    """A run in the middle of its fifth step: groups of four, some of equal rewards, some rewards that fail."""

    def reward(key: RolloutKey) -> float:
        group, index, _ = key
        if (group % 11 == 3 and index == 1) or (group % 13 == 6 and index < 3):
            raise RewardError("this one failed")
        return 1.0 if group % 5 == 2 else float(index % 2)

    script = Script(tokens=lambda key: 3 + (key[0] * 7 + key[1] * 5) % 9, reward=reward, step_s=9.0, apply_s=1.0, until_s=42.5)
    run = run_virtual(Miniature(script, groups_per_step=4, group_size=4, max_staleness=2, window=2).play())
    return {"now": run.account.to_wire(), "saved": run.account.given_up("resume").to_wire()}


def draw_ledger(figure: Figure, data: dict[str, Any]) -> None:
    """Where every generated token is: the bars below the first one add up to it."""
    account = data["now"]
    rows = [("generated", account["generated"], DARK, "as the engine's chunks arrive"),
            ("trained", account["trained"], VERSIONS[2], "by the trainer, per step"),
            ("masked", account["masked"], VERSIONS[0], "with it: those without gradient")]
    rows += [(f"dropped, {reason}", count, VERSIONS[1], "by the buffer, as it drops")
             for reason, count in sorted(account["dropped"].items())]
    rows += [("buffered", account["buffered"], VERSIONS[3], "anew: rollouts in the buffer"),
             ("in flight", account["in_flight"], VERSIONS[4], "anew: running sessions")]
    figure.set_size_inches(WIDTH_IN, 0.42 * len(rows) + 1.3)
    axes = figure.subplots()
    total, left = account["generated"][0], 0
    for row, (_, (tokens, rollouts), colour, counted) in enumerate(rows):
        left = 0 if row <= 1 else left
        axes.barh(row, tokens, left=left, height=0.66, color=colour)
        axes.text(1.03 * total, row, f"{tokens}", ha="left", va="center", weight="bold")
        axes.text(1.26 * total, row, f"{rollouts}", ha="left", va="center")
        axes.text(1.52 * total, row, counted, ha="left", va="center", color=DARK, fontsize=8)
        left += tokens
    for place, head in ((1.03, "tokens"), (1.26, "rollouts"), (1.52, "counted")):
        axes.text(place * total, -0.75, head, weight="bold", fontsize=8.5)
    saved = data["saved"]["dropped"]["resume"]
    footnote = f"A checkpoint saved now accounts for the last two as dropped, resume: {saved[0]} tokens of {saved[1]} rollouts."
    axes.text(-0.55 * total, len(rows) - 0.05, footnote, va="center", color=DARK)
    axes.plot([total, total], [-0.4, len(rows) - 0.6], color=GRID, linewidth=1, zorder=0)
    axes.set(yticks=range(len(rows)), yticklabels=[name for name, *_ in rows], ylim=(len(rows) + 0.3, -1.2), xlim=(0, 2.25 * total),
             xticks=())
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


# All of them -----------------------------------------------------------------------------------------------------------------


def _canvas(figure: Figure, *, height: float) -> Axes:
    """The whole figure as a sheet, in inches."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH_IN), ylim=(0, height))
    axes.axis("off")
    return axes


def _box(axes: Axes, left: float, bottom: float, *, width: float, height: float, colour: str, title: str, text: str) -> None:
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor="white",
                                  edgecolor=colour, linewidth=1.6))
    axes.text(left + width / 2, bottom + height - 0.15, title, ha="center", va="top", weight="bold", color=colour, fontsize=10)
    axes.text(left + width / 2, bottom + height - 0.48, text, ha="center", va="top", fontsize=8.5, linespacing=1.35)


PICTURES = {"staleness": (staleness_data, draw_staleness), "logprobs": (logprobs_data, draw_logprobs),
            "interruption": (interruption_data, draw_interruption), "weight_sync": (weight_sync_data, draw_weight_sync),
            "ledger": (ledger_data, draw_ledger)}


def numbers() -> Iterator[tuple[str, str]]:
    """Name and numbers, as JSON, of each picture."""
    for name, (make, _) in PICTURES.items():
        yield name, json.dumps(make(), sort_keys=True)


def write(folder: Path, *, suffix: str = "svg") -> None:
    """Draw all of them into `folder`; the same numbers and the same matplotlib give the same bytes."""
    with matplotlib.rc_context(STYLE):
        for name, data in numbers():
            figure = Figure(layout=None if name in ("logprobs", "weight_sync") else "constrained", facecolor="white")
            PICTURES[name][1](figure, json.loads(data))
            metadata = {"Date": None, "Description": data} if suffix == "svg" else None
            figure.savefig(folder / f"{name}.{suffix}", metadata=metadata, dpi=100)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

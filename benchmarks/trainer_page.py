"""The tables of docs/trainer.md, made from the results of `benchmarks.trainer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

PAGE = ROOT / "docs" / "trainer.md"
BEGIN, END = "<!-- made by python -m benchmarks.trainer --page -->", "<!-- end of what is made -->"
NAMES = {"asyncrl": "asyncrl", "sequences": "transformers, a loop over sequences", "packed": "transformers, packed rows, its own mask",
         "trl": "TRL 1.16.0, defaults, one batch", "trl_in_eights": "TRL 1.16.0, eight sequences at a time",
         "trl_in_eights_no_checkpointing": "TRL 1.16.0, eight at a time, no checkpointing",
         "asyncrl_low_memory": "asyncrl, half the chunk", "cross_entropy": "`F.cross_entropy`, whole logits"}


def tables(results: Path) -> str:
    """Markdown of all sections that have a file."""
    parts = []
    for name, make in (("head", _head), ("steps-0.6M", _steps), ("steps-135M", _steps), ("scaling", _scaling), ("gpu", _gpu)):
        file = results / f"{name}.json"
        if file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            parts.append(f"{make(found)}\n\n{_where(found)}")
    return "\n\n".join(parts)


def write(results: Path) -> None:
    """Put the tables where the page has its marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")


def _where(found: dict[str, Any]) -> str:
    missed = [name for name, is_met in found.get("met", {}).items() if not is_met]
    wanted = ", ".join(f"{name} {value:.3g}" for name, value in found.get("targets", {}).items())
    targets = f" Targets: {wanted}; {'missed: ' + ', '.join(missed) if missed else 'all met'}." if wanted else ""
    machine = found["machine"]
    return (f"{machine['cpu']}, {machine['cores']} cores, {found['threads']} threads, load average {found['load'][0]} before and "
            f"{found['load'][1]} after.{targets}")


def _head(found: dict[str, Any]) -> str:
    rows = [f"Output layer and loss, forward and backward, {found['predictions']:,} predictions of {found['vocabulary']:,} tokens from "
            f"{found['hidden']} numbers, float32:", "", "| | s | MiB over the inputs |", "|---|---|---|"]
    rows += [f"| {NAMES[name]} | {row['median_s']:.2f} | {row['peak_mib']:.0f} |" for name, row in found["ways"].items()]
    ratios = found["ratios"]
    return "\n".join([*rows, "", f"Time over whole logits: {ratios['time']:.2f}, with half the chunk {ratios['time_low_memory']:.2f}; "
                                 f"memory {ratios['memory']:.3f} and {ratios['memory_low_memory']:.3f}."])


def _steps(found: dict[str, Any]) -> str:
    rows = [f"A step of {found['sequences']} sequences, {found['tokens']:,} tokens, {found['padded_tokens']:,} padded, {found['model']} "
            "parameters, float32:", "", "| | tokens/s | peak MiB | ours: times its tokens/s | share of its memory |",
            "|---|---|---|---|---|"]
    for name, row in found["trainers"].items():
        ratios = found["ratios"].get(name)
        beside = f"{ratios['tokens_per_s']:.2f} | {ratios['memory']:.2f}" if ratios else "|"
        rows.append(f"| {NAMES[name]} | {row['tokens_per_s']:,.0f} | {row['peak_mib']:,.0f} | {beside} |")
    return "\n".join(rows)


def _scaling(found: dict[str, Any]) -> str:
    rows = [f"Ranks of one thread each on gloo, {found['machine']['cores']} cores, the 0.6M model, {found['tokens']:,} tokens a step:", "",
            "| ranks | tokens/s | times one rank | waiting for the slowest |", "|---|---|---|---|"]
    rows += [f"| {ranks} | {row['tokens_per_s']:,.0f} | {row['over_one']:.2f} | {row['rank_imbalance']:.3f} |"
             for ranks, row in found["ranks"].items()]
    return "\n".join(rows)


def _gpu(found: dict[str, Any]) -> str:
    rows = [f"Forward and backward of 4,096 packed tokens in bfloat16 on {found['device']}:", "",
            "| Qwen2.5's shape | attention | tokens/s | model FLOP utilisation | peak GiB |", "|---|---|---|---|---|"]
    rows += [f"| {name} | {row['attention']} | {row['tokens_per_s']:,} | {'' if row['mfu'] is None else format(row['mfu'], '.3f')} | "
             f"{row['peak_gib']} |" for name, row in found["models"].items()]
    return "\n".join(rows)

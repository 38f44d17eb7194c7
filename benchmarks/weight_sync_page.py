"""The tables of docs/weight_sync.md, made from the results of `benchmarks.weight_sync`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

PAGE = ROOT / "docs" / "weight_sync.md"
BEGIN, END = "<!-- made by python -m benchmarks.weight_sync --page -->", "<!-- end of what is made -->"
MODELS = ("0.6M", "135M", "0.5B")
OTHERS = {"gather": "two FSDP2 ranks gather, whole file, `reload_weights`", "reload": "whole file, `reload_weights`",
          "load": "whole file, loader alone", "vllm_sparse": "vLLM's sparse loader",
          "int32": "int32 and value"}


def tables(results: Path) -> str:
    """Markdown of all files there are."""
    parts = []
    for section, make in (("encode", _encode), ("sync", _sync)):
        found = [json.loads(file.read_text(encoding="utf-8")) for name in MODELS if (file := results / f"{section}-{name}.json").exists()]
        if found:
            parts.append("\n".join([make(found), "", *map(_where, found)]))
    return "\n\n".join(parts)


def write(results: Path) -> None:
    """Put the tables where the page has its marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")


def _encode(models: list[dict[str, Any]]) -> str:
    rows = ["Detection and encoding, from published bits in memory to payloads in memory, in ms, and its speed over that of `copy_`:", "",
            "| model | changed | `copy_` | numba | share | NumPy | share | bytes a change | share of dense | modes |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for found in models:
        for row in found["densities"]:
            fast = f"{_ms(row['numba']['seconds'])} | {row['numba']['share_of_copy']:.0%}" if "numba" in row else "|"
            plain = f"{_ms(row['numpy']['seconds'])} | {row['numpy']['share_of_copy']:.0%}"
            rows.append(f"| {found['model']} | {_percent(row['density'])} | {_ms(found['copy_s'])} | {fast} | {plain} | "
                        f"{row['bytes_per_change']:.2f} | {_percent(row['share_of_dense'])} | {', '.join(row['modes'])} |")
    return "\n".join(rows)


def _sync(models: list[dict[str, Any]]) -> str:
    rows = ["Whole syncs into vLLM, from the trainer's float32 weights to an engine with an empty prefix cache, in ms:", "",
            "| model | changed | `copy_` | publish | fetch | pause | whole | MB sent | pause of whole |",
            "|---|---|---|---|---|---|---|---|---|"]
    for found in models:
        for row in found["densities"]:
            way = row["ways"]["delta"]
            rows.append(f"| {found['model']} | {_percent(row['density'])} | {_ms(row['copy_s'])} | {_ms(way['publish_s'])} | "
                        f"{_ms(way['fetch_s'])} | {_ms(way['pause_s'])} | {_ms(way['total_s'])} | {way['sent_bytes'] / 1e6:,.2f} | "
                        f"{way['pause_share']:.0%} |")
    rows += ["", "Times that the delta is faster, the whole sync / in the pause; below 1 it is slower:", "",
             f"| model | changed | {' | '.join(OTHERS.values())} |", f"|---|---|{'---|' * len(OTHERS)}"]
    for found in models:
        for row in found["densities"]:
            beside = " | ".join(f"{row['ratios'][f'{name}_whole']:.1f} / {row['ratios'][f'{name}_pause']:.1f}" for name in OTHERS)
            rows.append(f"| {found['model']} | {_percent(row['density'])} | {beside} |")
    return "\n".join(rows)


def _where(found: dict[str, Any]) -> str:
    said = [f"{name} {row['found']:.3g} ({'met' if row['met'] else 'missed'}: {row['target']:g})" for name, row in found["targets"].items()]
    machine = found["machine"]
    return (f"* {found['model']}, {found['elements'] / 1e6:,.1f}M values: {machine['cpu']}, {machine['cores']} cores, {found['threads']} "
            f"threads, load average {found['load'][0]} before and {found['load'][1]} after. {'; '.join(said) or 'No targets'}.")


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"

"""The tables of docs/weight_sync.md, made from the results of `benchmarks.weight_sync`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

PAGE = ROOT / "docs" / "weight_sync.md"
BEGIN, END = "<!-- made by python -m benchmarks.weight_sync --page -->", "<!-- end of what is made -->"
MODELS = ("0.6M", "135M", "0.5B")
WAYS = {"delta": "delta", "int32": "int32 index and value, our routes, no proof", "vllm_sparse": "the same, vLLM's sparse loader",
        "load": "whole file, the model's loader alone", "reload": "whole file, vLLM's `reload_weights`"}


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
    rows = ["Detection and encoding, from published bits in memory to payloads in memory; share of the speed of `copy_`:", "",
            "| model | changed | `copy_`, ms | numba, ms | share | NumPy, ms | share | bytes a change | of dense | modes |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for found in models:
        for row in found["densities"]:
            fast = f"{row['numba']['seconds'] * 1e3:,.2f} | {row['numba']['share_of_copy']:.0%}" if "numba" in row else "|"
            rows.append(f"| {found['model']} | {_percent(row['density'])} | {row['copy_s'] * 1e3:,.2f} | {fast} | "
                        f"{row['numpy']['seconds'] * 1e3:,.2f} | {row['numpy']['share_of_copy']:.0%} | {row['bytes_per_change']:.2f} | "
                        f"{_percent(row['share_of_dense'])} | {', '.join(row['modes'])} |")
    return "\n".join(rows)


def _sync(models: list[dict[str, Any]]) -> str:
    rows = ["Whole syncs into vLLM, from the trainer's float32 weights to the engine with an empty prefix cache:", "",
            "| model | changed | way | publish, ms | fetch, ms | pause, ms | whole, ms | MB sent | delta is faster, times | in the pause |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for found in models:
        for row in found["densities"]:
            for name, way in row["ways"].items():
                ratios = row["ratios"]
                beside = f"{ratios[f'{name}_whole']:.1f} | {ratios[f'{name}_pause']:.1f}" if name != "delta" else "|"
                rows.append(f"| {found['model']} | {_percent(row['density'])} | {WAYS[name]} | {way['publish_s'] * 1e3:,.1f} | "
                            f"{way['fetch_s'] * 1e3:,.1f} | {way['pause_s'] * 1e3:,.1f} | {way['total_s'] * 1e3:,.1f} | "
                            f"{way['sent_bytes'] / 1e6:,.2f} | {beside} |")
    return "\n".join(rows)


def _where(found: dict[str, Any]) -> str:
    said = [f"{name} {row['found']:.3g} ({'met' if row['met'] else 'missed'}: {row['target']:g})" for name, row in found["targets"].items()]
    machine = found["machine"]
    return (f"* {found['model']}, {found['elements'] / 1e6:,.1f}M values: {machine['cpu']}, {machine['cores']} cores, {found['threads']} "
            f"threads, load average {found['load'][0]} before and {found['load'][1]} after. {'; '.join(said) or 'No targets'}.")


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"

"""Ablations: one recipe over a grid of settings and seeds. `asyncrl ablate FILE`

    file ──▶ config ──▶ grid ──▶ runs (children of `asyncrl train`) ──▶ measure ──▶ statistics ──▶ report, plots

Needs neither torch nor the loop: what it knows of a run is its configuration, its exit code and the rows it wrote.
"""

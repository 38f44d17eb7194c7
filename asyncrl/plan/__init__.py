"""The account of a step before it is run: FLOP, bytes and seconds of a model, machines and a workload. Needs no torch.

Everything is pure functions of frozen dataclasses, in SI units: bytes, seconds, FLOP. docs/planner.md says how far to trust them.
"""

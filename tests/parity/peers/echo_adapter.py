"""An adapter of no peer, in our own environment: what test_client.py asks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from adapter import Settings, Tensors, serve, with_gradient


def scaled(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """x times a factor, after a line that is nobody's answer."""
    print("a peer may print what it likes")
    return {"y": tensors["x"] * settings["factor"]}


def squared(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Σ x² with its gradient."""
    return with_gradient(tensors["x"], lambda x: x.square().sum())


def allocated(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Holds `floats` of float64 for a moment."""
    return {"y": torch.ones(settings["floats"], dtype=torch.float64).sum()}


def refused(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Raises."""
    raise ValueError("this peer will not")


if __name__ == "__main__":
    serve({"scaled": scaled, "squared": squared, "allocated": allocated, "refused": refused})

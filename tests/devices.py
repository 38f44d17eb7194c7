"""Where a test runs: on the CPU always, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]

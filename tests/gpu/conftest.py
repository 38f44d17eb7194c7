from pathlib import Path

import pytest

from tests.devices import DEVICES
from tests.gpu.one_rank import OneRank
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 16, the narrowest flex_attention takes."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=3, hidden=64)


@pytest.fixture(params=DEVICES)
def one_rank(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneRank:
    return OneRank(request.param, tmp_path, monkeypatch)

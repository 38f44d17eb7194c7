import subprocess
import sys

import pytest

from asyncrl.correction import Correction, preset, presets
from asyncrl.errors import ConfigError


def test_presets_have_the_bounds_of_their_papers() -> None:
    assert preset("token_tis").truncate_high == 2.0
    assert (preset("icepop").mask_low, preset("icepop").mask_high) == (0.5, 5.0)
    assert preset("none").level == "none"
    assert all(preset(name).log_clamp == 20.0 for name in presets())


def test_unknown_preset_names_its_nearest_neighbour() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'token_tis'") as caught:
        preset("token_tsi")
    assert "icepop" in caught.value.allowed


@pytest.mark.parametrize(("fields", "field"), [
    ({"level": "sentence"}, "correction.level"),
    ({"truncate_high": -1.0}, "correction.truncate_high"),
    ({"truncate_high": float("nan")}, "correction.truncate_high"),
    ({"truncate_high": 1e9}, "correction.truncate_high"),
    ({"mask_low": 0.0}, "correction.mask_low"),
    ({"mask_low": 2.0, "mask_high": 0.5}, "correction.mask_low, correction.mask_high"),
    ({"level": "none", "truncate_high": 2.0}, "correction.truncate_high, correction.level"),
    ({"log_clamp": 0.0}, "correction.log_clamp"),
    ({"log_clamp": 80.0}, "correction.log_clamp"),
])
def test_bounds_that_cannot_work_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Correction(**fields)
    assert caught.value.field == field


def test_reading_presets_and_advantages_loads_no_torch() -> None:
    code = ("import sys, asyncrl.correction.presets, asyncrl.correction.advantages\n"
            "from asyncrl.correction import preset; preset('icepop')\n"
            "assert 'torch' not in sys.modules, 'torch was imported'\n"
            "from asyncrl.correction import correct\n"
            "assert 'torch' in sys.modules and callable(correct)\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})

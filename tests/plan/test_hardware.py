import math
from dataclasses import replace

import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.hardware import HARDWARE, Efficiencies, Links, hardware_named


def test_the_table_has_the_machines_of_the_data_sheets() -> None:
    assert set(HARDWARE) == {"h100", "h200", "b200", "a100", "mi300x"}
    h100 = hardware_named("H100")
    assert (h100.peak_flop_s, h100.memory_bytes, h100.memory_bytes_s) == (989e12, 80e9, 3.35e12)


def test_an_unknown_machine_lists_those_known() -> None:
    with pytest.raises(ConfigError, match=r"h100, h200.*custom"):
        hardware_named("tpu")


@pytest.mark.parametrize("change", [{"peak_flop_s": 0.0}, {"memory_bytes": math.nan}, {"memory_bytes_s": -1.0}, {"gpus_per_node": 0}])
def test_a_machine_is_checked(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(hardware_named("h100"), **change)


def test_rates_and_shares_are_checked() -> None:
    with pytest.raises(ConfigError, match="train_mfu"):
        Efficiencies(train_mfu=40)
    with pytest.raises(ConfigError, match="reserve"):
        Efficiencies(reserve=1.0)
    with pytest.raises(ConfigError, match="disk_bytes_s"):
        Links(disk_bytes_s=0)

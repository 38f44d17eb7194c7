"""The reward picture is written, with what it was given in it."""

from __future__ import annotations

import pytest

from asyncrl.observe.plots import plot_reward

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("steps", "rewards", "evaluations"), [
    ([1, 2, 3], [0.2, 0.5, 0.9], {0: 0.1, 3: 0.8}), ([1], [0.5], {}), ([], [], {}), ([1, 2], [-1.0, 0.5], {}),
    ([1, 2], [3.0, 70.0], {2: 60.0}),
    ([1], [0.5], {1: float("nan")})])
def test_a_picture_is_written_whatever_the_rewards(tmp_path, steps, rewards, evaluations):
    path = tmp_path / "reward.png"
    plot_reward(path, steps=steps, rewards=rewards, evaluations=evaluations, title="quickstart")
    assert path.read_bytes().startswith(PNG)

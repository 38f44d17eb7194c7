"""Ours beside verl, TRL and AReaL as they install, on the same random batches. `make peers` makes their environments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from asyncrl.correction import presets
from tests.parity.peers import areal_cases, trl_cases, verl_advantages, verl_cases
from tests.parity.peers.cases import TOLERANCES, Case
from tests.parity.peers.client import PEERS, Arrays, Peer, is_installed
from tests.parity.peers.scenes import Scene

CASES: tuple[Case, ...] = (*verl_cases.CASES, *verl_advantages.CASES, *trl_cases.CASES, *areal_cases.CASES)
COVERED = tuple(case.evidence for case in CASES)
"""PEER/NAME of everything that is compared: what the evidence of a preset may cite as `parity PEER/NAME`."""
SEEDS = (1, 2, 3)
SIZES: tuple[dict[str, int], ...] = ({}, {"sequences": 16, "longest": 60}, {"sequences": 4, "longest": 6})
PAGE = Path(__file__).parents[2] / "docs" / "correction_peers.md"


class Peers:
    """The peers that were asked so far, each started once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started: dict[str, Peer] = {}

    def __getitem__(self, name: str) -> Peer:
        if not is_installed(name):
            pytest.skip("make peers")
        if name not in self._started:
            self._started[name] = self._stack.enter_context(Peer.of(name))
        return self._started[name]


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


def scenes(case: Case) -> Iterator[tuple[str, Scene]]:
    for dtype in case.dtypes:
        for seed, size in zip(SEEDS, SIZES, strict=True):
            yield dtype, Scene.draw(seed, dtype=dtype, **{**size, **case.scene})


def comparable(answer: Arrays, scene: Scene) -> Arrays:
    """A padded answer packed as ours is."""
    sequences = len(scene.lengths)
    padded = {(sequences, int(scene.lengths.max())), (sequences, 1)}
    return {name: scene.unpadded(values) if values.shape in padded else values for name, values in answer.items()}


def agree(theirs: Arrays, ours: Arrays, *, tolerance: float) -> bool:
    assert ours, "nothing was compared"
    return all(np.allclose(theirs[name], values, rtol=tolerance, atol=tolerance, equal_nan=True) for name, values in ours.items())


def tells(ours: Arrays, scene: Scene) -> bool:
    """Whether a mistake could show: there is a gradient; or weights, or tokens kept and tokens dropped."""
    if "gradient" in ours:
        return bool(ours["gradient"][scene.mask].any())
    choices = [ours[name] for name in ("keep_mask", "weights") if name in ours]
    return not choices or any(len(np.unique(values[scene.mask])) > 1 for values in choices)


def assert_agree(theirs: Arrays, ours: Arrays, *, tolerance: float, scene: Scene) -> None:
    for name, values in ours.items():
        assert theirs[name].shape == values.shape, name
        where = scene.mask if values.shape == scene.mask.shape else ...
        np.testing.assert_allclose(theirs[name][where], values[where], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.evidence)
def test_ours_and_theirs_agree_or_differ_as_explained(case: Case, peers: Peers) -> None:
    peer, parted, told = peers[case.peer], False, False
    for dtype, scene in scenes(case):
        tolerance = max(TOLERANCES[dtype], case.tolerance)
        ours = case.ours(scene)
        theirs = comparable(peer.ask(case.computation, case.arrays(scene), settings=case.settings).arrays, scene)
        expected = ours if case.as_theirs is None else case.as_theirs(scene, ours)
        assert_agree(theirs, expected, tolerance=tolerance, scene=scene)
        parted = parted or not agree(theirs, ours, tolerance=10 * tolerance)
        told = told or tells(ours, scene)
    assert parted == bool(case.difference), "a difference that is explained has gone"
    assert told or case.says_nothing, "nothing was kept, or nothing was dropped, in any of the batches"


def test_every_difference_is_explained_on_the_page_in_these_words() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [case.evidence for case in CASES if case.difference and case.difference not in page] == []


def test_every_preset_of_a_peer_is_compared_with_it() -> None:
    named = {name.replace("/", "/preset_") for name in presets() if name.split("/")[0] in PEERS}
    assert named - set(COVERED) == {"areal/preset_kpop"}, "KPop came after AReaL 1.0.4"


def test_names_are_given_once_and_every_difference_says_what_theirs_is() -> None:
    assert len(set(COVERED)) == len(COVERED)
    assert {case.peer for case in CASES} == set(PEERS)
    assert [case.evidence for case in CASES if bool(case.difference) != (case.as_theirs is not None)] == []

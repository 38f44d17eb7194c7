"""Asking a process of another environment, tried on our own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.parity.peers.client import Peer, PeerFailed, packed, padded

ECHO = Path(__file__).with_name("echo_adapter.py")
ROOT = Path(__file__).parents[3]
X = np.array([1.0, -2.0, 3.0])


@pytest.fixture(scope="module")
def echo() -> Iterator[Peer]:
    with Peer(Path(sys.executable), ECHO) as peer:
        yield peer


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_arrays_go_and_come_back_in_their_dtype(echo: Peer, dtype: str) -> None:
    answer = echo.ask("scaled", {"x": X.astype(dtype)}, settings={"factor": 2})
    assert answer.arrays["y"].dtype == dtype
    assert answer.arrays["y"].tolist() == [2, -4, 6]
    assert (answer.seconds, answer.peak_bytes) == ((), None)


def test_a_loss_comes_with_its_gradient(echo: Peer) -> None:
    answer = echo.ask("squared", {"x": X})
    assert float(answer.arrays["loss"]) == 14.0
    assert answer.arrays["gradient"].tolist() == [2.0, -4.0, 6.0]


def test_every_repeat_is_timed(echo: Peer) -> None:
    seconds = echo.ask("squared", {"x": X}, repeats=5).seconds
    assert len(seconds) == 5
    assert min(seconds) > 0.0


def test_memory_is_what_a_run_holds_at_most(echo: Peer) -> None:
    floats = 4_000_000
    peak = echo.ask("allocated", {"x": X}, settings={"floats": floats}, memory=True).peak_bytes
    assert peak == pytest.approx(8 * floats, rel=0.05)


def test_an_error_has_the_words_of_the_peer_which_goes_on(echo: Peer) -> None:
    with pytest.raises(PeerFailed, match="ValueError: this peer will not"):
        echo.ask("refused", {"x": X})
    with pytest.raises(PeerFailed, match="KeyError: 'no_such'"):
        echo.ask("no_such", {"x": X})
    assert echo.ask("scaled", {"x": X}, settings={"factor": 1}).arrays["y"].tolist() == X.tolist()


def test_a_peer_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("raise SystemExit('no such package')")
    with Peer(Path(sys.executable), script) as peer, pytest.raises(PeerFailed, match=r"it ended:\nno such package"):
        peer.ask("scaled", {"x": X})


def test_a_peer_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import threading\nthreading.Event().wait()")
    with Peer(Path(sys.executable), script, timeout_s=0.1) as peer:
        with pytest.raises(PeerFailed, match=r"no answer within 0\.1 s"):
            peer.ask("scaled", {"x": X})
        assert peer.process.wait(timeout=60.0) == -signal.SIGKILL


def test_a_peer_dies_with_the_process_that_asks() -> None:
    program = ("import sys, numpy\nfrom pathlib import Path\nfrom tests.parity.peers.client import Peer\n"
               f"peer = Peer(Path(sys.executable), Path({str(ECHO)!r}))\n"
               "peer.ask('scaled', {'x': numpy.ones(1)}, settings={'factor': 1})\nprint(peer.process.pid, flush=True)\nsys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as asking:
        assert asking.stdout is not None
        peer = os.pidfd_open(int(asking.stdout.readline()))
        asking.kill()
        assert select.select([peer], [], [], 60.0)[0], "the peer outlived the process that asked"
    os.close(peer)


def test_packing_undoes_padding() -> None:
    lengths = np.array([2, 0, 3])
    rows = padded({"x": np.arange(5)}, lengths=lengths)["x"]
    assert rows.tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    assert packed(rows, lengths=lengths).tolist() == [0, 1, 2, 3, 4]

"""What the console writes to: a real terminal that nobody reads from, a pipe, a stream that is not one of the system's."""

from __future__ import annotations

import io
import os
import threading

from asyncrl.observe.console import open_console
from asyncrl.observe.output import Output
from tests.observe.rows import SETTINGS, step_row

BOUND_S = 20.0


def test_a_terminal_that_nobody_reads_from_does_not_hold_the_run(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as terminal:
        console = open_console(stdout=terminal, stderr=io.StringIO())
        console.start(SETTINGS, where="here", with_table=False)
        console.detach()
        for step in range(1, 4001):
            console.row(step_row(step))
        console.close(timeout_s=0.01)
        assert console.lost > 0
        assert console.error
        reader = threading.Thread(target=drain, args=(master,))
        reader.start()
        console.close(BOUND_S)
    reader.join(BOUND_S)
    os.close(master)
    assert not reader.is_alive()


def drain(descriptor: int) -> None:
    """Read until the other end is closed."""
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        return


def test_a_stream_stays_open_and_keeps_its_order(tmp_path):
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as stream:
        stream.write("before\n")
        output = Output(stream)
        output.line("ours → ü")
        output.close()
        output.close()
        stream.write("after\n")
    assert path.read_text(encoding="utf-8") == "before\nours → ü\nafter\n"


def test_a_stream_without_a_descriptor_is_written_to_as_it_is():
    stream = io.StringIO()
    output = Output(stream)
    assert output.write("text") == 4
    assert (stream.getvalue(), output.isatty(), output.encoding) == ("text", False, "utf-8")


def test_a_terminal_that_somebody_made_non_blocking_gets_all_of_it():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received: list[bytes] = []

    def read() -> None:
        while data := os.read(reading, 65536):
            received.append(data)

    reader = threading.Thread(target=read)
    with open(writing, "w", encoding="utf-8") as stream:
        output = Output(stream)
        reader.start()
        output.write("x" * 10**6)
        output.close()
    reader.join(BOUND_S)
    os.close(reading)
    assert len(b"".join(received)) == 10**6

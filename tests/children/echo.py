"""A child for tests: answers, streams, fails and dies on demand."""

from __future__ import annotations

import os
import signal
import sys
import threading

from asyncrl.channel import CANCEL, CLOSE, Channel, Reply, Request, serve_calls
from asyncrl.errors import ConfigError, WrongBase


def serve(channel: Channel, spec: dict) -> None:
    if spec.get("set_up") == "fails":
        raise WrongBase("the set-up holds base 3")
    if spec.get("set_up") == "hangs":
        sys.stderr.write("about to hang\n")
        threading.Event().wait()
    channel.ready({"got": spec, "pid": os.getpid()})
    if spec.get("mode") == "streams":
        _serve_streams(channel)
        return
    serve_calls(channel, {"echo": _echo, "raise": _raise, "die": _die, "write": _write, "sigint": _sigint,
                          "never": lambda request: threading.Event().wait()})


def _echo(request: Request) -> Reply:
    return Reply({"body": request.body, "deadline_s": request.deadline_s}, request.arrays)


def _raise(request: Request) -> None:
    if request.body["kind"] == "ConfigError":
        raise ConfigError("a.b", value=2, allowed="1", remedy="Take 1.")
    raise {"WrongBase": WrongBase, "KeyError": KeyError}[request.body["kind"]]("no such thing")


def _die(request: Request) -> None:
    if request.body.get("leaves_another") and os.fork() == 0:
        os.read(int(sys.argv[2]), 1)
        os._exit(0)
    sys.stderr.write("last words\n")
    os._exit(request.body["code"])


def _write(request: Request) -> None:
    """Raw bytes to the controller, past the framing."""
    os.write(int(sys.argv[2]), request.body["data"])


def _sigint(request: Request) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _serve_streams(channel: Channel) -> None:
    """`count` sends that many parts; `endless` sends one and goes on until cancelled; `cancelled` lists what was."""
    cancelled: list[int] = []
    while True:
        request = channel.recv()
        if request.op == CLOSE:
            return
        if request.op == CANCEL:
            cancelled.append(request.id)
        elif request.op == "cancelled":
            channel.reply(request.id, {"ids": cancelled})
        elif request.op == "endless":
            channel.reply(request.id, {"id": request.id}, last=False)
        else:
            for index in range(request.body["parts"]):
                channel.reply(request.id, {"index": index}, arrays=request.arrays, last=index + 1 == request.body["parts"])

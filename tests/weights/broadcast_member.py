"""A member of a delivery, as a process of its own: run as FOLDER NAME TIMEOUT_S RANKS DEVICE; `BroadcastMember` tells it what to do.

It says every collective of its group, in order. Told to stop at one, it says so before that one, and goes on when it is told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

SLICE = 1000
RANKS = 2


class BroadcastMember:
    """The parent's end of such a process."""

    def __init__(self, folder: Path, name: str, *, timeout_s: float = 20.0, ranks: int = RANKS, device: str = "cpu") -> None:
        self.name = name
        environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen([sys.executable, __file__, str(folder), name, str(timeout_s), str(ranks), device],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def tell(self, **command: Any) -> None:
        """Returns at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended"
        return dict(json.loads(line)) if line.startswith("{") else {"said": line} | self.answer()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def payload(seed: int, size: int) -> np.ndarray:
    """What is sent."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def serve(folder: Path, name: str, timeout_s: float, ranks: int, device: str) -> None:
    from asyncrl.errors import AsyncRLError
    from asyncrl.weights import broadcast
    from asyncrl.weights.manifest import Manifest
    from asyncrl.weights.process_group import Group
    from asyncrl.weights.transport import HeldVersion

    broadcast.SLICE_BYTES = SLICE
    trace: list[tuple[int, int]] = []
    stop_at = [-1]
    plain = Group.broadcast

    def traced(self: Group, tensor: Any, *, root: int) -> None:
        if len(trace) == stop_at[0]:
            stop_at[0] = -1
            print(json.dumps({"at": len(trace)}), flush=True)
            sys.stdin.readline()
        plain(self, tensor, root=root)
        trace.append((root, len(tensor)))

    Group.broadcast = traced  # type: ignore[method-assign]
    kind, number = name.split("-")
    if kind == "trainer":
        sink = broadcast.BroadcastSink(folder, rank=int(number), ranks=ranks, device=device, timeout_s=timeout_s)
    else:
        engine, _, worker = name.partition("/")
        source = broadcast.BroadcastSource(folder, engine=engine, worker=int(worker or 0), workers=2 if worker else 1, device=device,
                                           timeout_s=timeout_s)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        trace.clear()
        stop_at[0] = command.pop("stop_at", -1)
        answer: dict[str, Any] = {}
        try:
            if "put" in command:
                # in two chunks, of which the second ends in the middle of a slice
                parts = [sink.put_part(command["put"], rank=int(number), bucket=bucket, chunks=[data[:7], data[7:]])
                         for bucket, data in enumerate(payload(seed, size) for seed, size in command["parts"])]
                answer["parts"] = [[part.path, part.bytes, part.xxh3] for part in parts]
            elif "deliver" in command:
                sink.deliver(Manifest.from_json(command["deliver"]), engines=command["engines"])
            else:
                manifest = Manifest.from_json(command["parts"])
                held = command.get("held")
                source.chain(manifest, held=held and HeldVersion(*held))
                answer["digests"] = [xxhash.xxh3_128_hexdigest(data) for data in source.parts(manifest)]
        except AsyncRLError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["trace"] = trace
        print(json.dumps(answer | {"group": (sink if kind == "trainer" else source)._exchange.joined}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

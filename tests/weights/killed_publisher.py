"""A publisher that is killed at every line it runs, for `test_store_faults`. Prints what was found after each kill. Run as FOLDER KIND.

Each round forks; the fork publishes one version and kills itself with SIGKILL at line n of the store's code, until n is beyond its end.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from asyncrl.errors import WeightSyncError
from asyncrl.weights import files, manifest_files, planes, store
from asyncrl.weights.files import LocalFiles
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.store import StoreTransport

TRACED = {module.__file__ for module in (files, manifest_files, planes, store)}


def publish(target: StoreTransport, version: int, *, content: bytes) -> None:
    parts = tuple(target.put_part(version, rank=rank, bucket=0, chunks=[content[:700], content[700:]]) for rank in range(2))
    base = version - 1 if version else None
    target.commit(Manifest(run_epoch=0, version=version, base=base, parts=parts, tensors=(), state_hash=content[0]))


def killed_at(line: int, target: StoreTransport, version: int) -> bool:
    """Whether the kill came before the version was published."""
    child = os.fork()
    if not child:
        seen = 0

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal seen
            if frame.f_code.co_filename not in TRACED:
                return None
            seen += event == "line"
            if seen > line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        publish(target, version, content=bytes([version % 251]) * 1500)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def look(root: Path, version: int, *, durable: bool) -> str:
    """`absent` or `whole`; what else there is fails. A version is then published over what was left, with another content."""
    reader = StoreTransport(LocalFiles(root, durable=durable))
    found = version in reader.versions()
    for each in reader.versions():
        assert {part.tobytes() for part in reader.parts(reader.manifest(each))} in ({bytes([each % 251]) * 1500}, {b"healed" * 250})
    following = version + found
    publish(reader, following, content=b"healed" * 250)
    assert reader.latest() == following
    reader.retain(following)
    assert [path.name for path in root.iterdir()] == [f"v{following:06d}"]
    return "whole" if found else "absent"


def main() -> None:
    root, kind = Path(sys.argv[1]), sys.argv[2]
    target = StoreTransport(LocalFiles(root, durable=kind == "durable"), compression="zstd" if kind == "packed" else "none")
    publish(target, 0, content=bytes(1500))
    seen: Counter[str] = Counter()
    line = 0
    while killed_at(line, target, version := target.latest() + 1):
        seen[look(root, version, durable=kind == "durable")] += 1
        line += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        target.put_part(10**6, rank=0, bucket=0, chunks=[bytes(range(250)) * 3, os.urandom(2000)])
    except WeightSyncError as error:
        seen[str(error)] += 1
    left = sum(1 for path in (root / "v1000000").iterdir())
    print(json.dumps({"rounds": line, "seen": seen, "left": left}))


if __name__ == "__main__":
    main()

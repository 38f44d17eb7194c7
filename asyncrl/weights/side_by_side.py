"""Work on the items of an iterator by several threads, which take them one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def side_by_side(items: Iterator[Item], work: Callable[[Item], None], *, threads: int) -> None:
    """Do `work` on each of `items`; at most one item a thread is taken ahead, by one thread at a time.

    Raises what the iterator or the work raises first, when every thread has stopped; what was not begun by then is left.
    """
    if threads == 1:
        for item in items:
            work(item)
        return
    taking, failed = threading.Lock(), threading.Event()

    def take_turns() -> None:
        try:
            while not failed.is_set():
                with taking:
                    taken = list(islice(items, 1))
                if not taken:
                    return
                work(taken[0])
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="asyncrl-write") as pool:
        workers = [pool.submit(take_turns) for _ in range(threads)]
    for worker in workers:
        worker.result()

"""Row groups on threads: the kernels release the interpreter lock, and every thread has scratch of its own."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def each(groups: Iterable[T], threads: int, work: Callable[[int, T], None]) -> None:
    """``work(thread, group)`` once per group, on at most ``threads`` threads, the caller's among them. The first exception is
    raised here.

    Which thread takes a group is left to chance: a group's result may not depend on it.
    """
    waiting = iter(list(groups))
    lock = threading.Lock()
    errors: list[Exception] = []

    def serve(thread: int) -> None:
        try:
            while not errors:
                with lock:
                    group = next(waiting, None)
                if group is None:
                    return
                work(thread, group)
        except Exception as error:  # noqa: BLE001 # boundary: carried to the caller
            errors.append(error)

    helpers = [threading.Thread(target=serve, args=(thread,), daemon=True) for thread in range(1, threads)]
    for helper in helpers:
        helper.start()
    serve(0)
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]

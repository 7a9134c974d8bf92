"""Times that survive a busy machine: CPU time of the calling thread, contestants taking turns, the minimum of several."""

import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def race(contestants: Mapping[str, Work], repeats: int) -> dict[str, float]:
    """Least CPU seconds of each contestant over ``repeats`` (at least five) rounds in which everybody runs once; one round to
    warm up."""
    best = dict.fromkeys(contestants, float("inf"))
    for turn in range(max(5, repeats) + 1):
        for name, work in contestants.items():
            start = time.thread_time()
            work()
            if turn:
                best[name] = min(best[name], time.thread_time() - start)
    return best


class Reference:
    """P: torch.mm of bf16 2048 x 2048 x 2048 in this process, the unit of the scoring goals."""

    flops = 2 * 2048**3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = (torch.randn(2048, 2048, generator=generator).bfloat16() for _ in range(2))
        self.out = torch.empty(2048, 2048, dtype=torch.bfloat16)

    def __call__(self) -> None:
        torch.mm(self.left, self.right, out=self.out)


def of_p(times: Mapping[str, float], name: str, flops: float) -> float:
    """The rate of ``name`` in units of P; ``times`` holds the Reference as ``P``."""
    return flops / times[name] / (Reference.flops / times["P"])


def peak_of(work: Work) -> float:
    """MiB by which the resident peak of the process grew over ``work`` (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _peak()
    work()
    return _peak() - before


def _peak() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

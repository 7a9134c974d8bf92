"""Fuzz the readers for a number of inputs: ``python long_run.py INPUTS [--seed N] [--evidence DIR --tie FILE] [--only NAME]``.

Prints one JSON object: inputs per target, how many were accepted and refused, everything that escaped, and the growth of resident
memory. Nothing but UserError and EvidenceError may leave a reader; no input may take more than five seconds of this
process's own time, or more memory than the limit. Exit code 1 when something escaped.
"""

import argparse
import json
import math
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from mutate import mutated, retreed, text_of
from targets import Target, targets

from palimpsest.core.errors import EvidenceError, UserError

#: processor seconds of one input, and bytes of address space above the start
SECONDS, ROOM = 5.0, 512 << 20
MOST_ESCAPES = 20


class TooSlow(BaseException):
    """An input took longer than allowed."""


def _alarm(number: int, frame: object) -> None:
    raise TooSlow


def next_input(rng: random.Random, target: Target, trees: list[object]) -> bytes:
    if target.json and rng.random() < 0.5:
        return text_of(retreed(rng, rng.choice(trees)))
    return mutated(rng, rng.choice(target.seeds), rng.choice(target.seeds))


def fuzz(target: Target, inputs: int, seed: int, escapes: list[dict[str, str]]) -> dict[str, int]:
    """Run one target; the counts. Appends what escaped to ``escapes``."""
    rng = random.Random(f"{seed}/{target.name}")
    trees = [json.loads(data) for data in target.seeds] if target.json else []
    counts = {"inputs": 0, "accepted": 0, "refused": 0, "escaped": 0}
    for _ in range(inputs):
        data = next_input(rng, target, trees)
        counts["inputs"] += 1
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            target.read(data)
            counts["accepted"] += 1
        except (UserError, EvidenceError):
            counts["refused"] += 1
        except (Exception, TooSlow) as error:  # noqa: BLE001 whatever it is, it is the finding
            counts["escaped"] += 1
            if len(escapes) < MOST_ESCAPES:
                where = traceback.extract_tb(error.__traceback__)[-1]
                shown = data[:300].decode("latin-1")
                what = f"{type(error).__name__}: {error}"[:300]
                escapes.append({"target": target.name, "error": what, "at": f"{where.name}:{where.lineno}", "input": shown})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--tie", type=Path)
    parser.add_argument("--only")
    args = parser.parse_args()
    found = [t for t in targets(args.evidence, args.tie.read_bytes() if args.tie else None) if args.only in (None, t.name)]
    for target in found:
        for data in target.seeds:
            target.read(data)
    signal.signal(signal.SIGPROF, _alarm)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shares, escapes, counts, started = sum(t.share for t in found), [], {}, time.monotonic()
    for target in found:
        counts[target.name] = fuzz(target, math.ceil(args.inputs * target.share / shares), args.seed, escapes)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    total = sum(c["inputs"] for c in counts.values())
    head = {"seed": args.seed, "inputs": total, "seconds": round(time.monotonic() - started, 1), "grown_kib": grown}
    print(json.dumps({**head, "targets": counts, "escapes": escapes}, indent=1))
    return 1 if escapes else 0


if __name__ == "__main__":
    sys.exit(main())

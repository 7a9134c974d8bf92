"""Tensor memory of one replay, step by step: torch's CPU allocator, profiled."""

import torch

from palimpsest.export.replay import Chunk, hidden_rows, selection
from palimpsest.run.meters import SCALAR_BYTES
from palimpsest_loader import runners
from palimpsest_loader.session import Session


def allocations(session: Session, chunk: Chunk, seed: int) -> dict[str, tuple[int, int]]:
    """Step -> (most bytes alive at once, bytes left when it ended), on rank 0; empty on others.

    The chunk is replayed once before, so that every view exists.
    """
    rows = hidden_rows(session.tree, seed + 1)[: chunk[1]]
    session.prefill(rows, chunk[0], **selection(session.tree, chunk))
    found = {}
    with torch.no_grad():
        for run, step in session.steps:
            now = runners.Chunk(chunk[0], chunk[1], rows)
            if session.comm.rank:  # torch profiles one thread at a time, and ranks take turns inside a collective
                run(step, now)
                continue
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
                run(step, now)
            events = [
                e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]" and abs(e.nbytes()) > SCALAR_BYTES
            ]
            alive = peak = 0
            for event in sorted(events, key=lambda e: e.start_ns()):
                alive += event.nbytes()
                peak = max(peak, alive)
            found[step.name] = (peak, alive)
    return found

"""The certificate of a plan: for every hand-over of bytes, the chain of steps that orders it in every schedule.

Lives are taken in the order of their first write. Whoever held a byte before must be finished before the next holder's
first write: one hand-over per holder found under it. Hand-overs chain, so every two lives that share a byte are ordered,
and a verifier needs no search: it follows links.
"""

from palimpsest.plan.canvas import Canvas
from palimpsest.plan.lifetime import Lifetimes, LiveRange
from palimpsest.plan.order import START
from palimpsest.plan.plan import Handover


def certify(lifetimes: Lifetimes, offsets: dict[str, int]) -> tuple[Handover, ...]:
    """One hand-over per (life, life it takes bytes from), in the order of the later first write. Offsets must be safe."""
    size = {name: lifetimes.program.by_name[name].nbytes for name in lifetimes.names}
    rank = {name: k for k, name in enumerate(lifetimes.names)}
    births = sorted(
        ((life.first, rank[name], name, life) for name in lifetimes.names for life in lifetimes.ranges[name]),
        key=lambda birth: birth[:2],
    )
    canvas: Canvas[tuple[str, LiveRange]] = Canvas()
    found = []
    for _, _, name, life in births:
        start, stop = offsets[name], offsets[name] + size[name]
        spans: dict[tuple[str, int], tuple[int, int, LiveRange]] = {}
        for a, b, (holder, held) in canvas.under(start, stop):
            if holder != name:
                low, high, _ = spans.get((holder, held.first), (a, b, held))
                spans[holder, held.first] = (min(low, a), max(high, b), held)
        for (holder, _), (a, b, held) in spans.items():
            found.append(Handover(holder, name, a, b, _chains(lifetimes, (holder, held), (name, life))))
        canvas.paint(start, stop, (name, life))
    return tuple(found)


def _chains(lifetimes: Lifetimes, early: tuple[str, LiveRange], late: tuple[str, LiveRange]) -> tuple[tuple[str, ...], ...]:
    """One chain per queue in which the earlier life was used, from its last access there to the later life's first write."""
    order, (_, one), (_, two) = lifetimes.order, early, late
    last: dict[int, int] = {}
    for a in one.accesses:
        last[order.queue[a] if START < a < order.end else -1] = a
    ends = [a for queue, a in last.items() if queue >= 0] or [START]
    if one.last >= two.first or not all(order.precedes(a, two.first) for a in ends):
        return ()
    fence = lifetimes.fence_between(one, two) if lifetimes.fenced(early[0], late[0]) else None
    chains = []
    for a in ends:
        if fence is None or a == fence:
            positions = order.chain(a, two.first)
        elif fence == two.first:
            positions = order.chain(a, fence)
        else:
            positions = (*order.chain(a, fence), *order.chain(fence, two.first)[1:])
        chains.append(tuple(lifetimes.step_name(p) for p in positions))
    return tuple(chains)

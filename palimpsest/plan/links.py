"""The checker's half of the certificate: which hand-overs there are, and whether every chain of steps holds link by link.

Follows links only, and shares no code with the module that wrote them.
"""

import itertools
from dataclasses import dataclass

from palimpsest.core.errors import PlanRefused
from palimpsest.core.spec import Program
from palimpsest.plan.canvas import Canvas
from palimpsest.plan.plan import Handover, Plan


@dataclass(frozen=True)
class Life:
    """One life of a buffer: its first and last position, and the last position per queue (``""`` for start and end)."""

    first: int
    last: int
    ends: tuple[tuple[str, int], ...]


def lives_of(program: Program) -> dict[str, tuple[Life, ...]]:
    """Reusable buffer -> lives; a new one begins wherever a step only writes it. Refuses a buffer nobody touches."""
    kinds = {b.name: b.kind for b in program.all_buffers}
    touched: dict[str, list[tuple[int, str, bool]]] = {name: [] for name, kind in kinds.items() if kind == "reusable"}
    for name in program.inputs:
        if name in touched:
            touched[name].append((-1, "", True))
    for i, step in enumerate(program.steps):
        only: dict[str, bool] = {}
        for access, name in step.accesses():
            if name in touched:
                only[name] = only.get(name, True) and access == "write"
        for name, fresh in only.items():
            touched[name].append((i, step.queue, fresh))
    for name in program.outputs:
        if name in touched:
            touched[name].append((len(program.steps), "", False))
    for name, found in touched.items():
        if not found:
            raise PlanRefused(f"program {program.name}: reusable buffer {name} is declared but no step touches it; remove it")
    return {name: _lives(found) for name, found in touched.items()}


def _lives(access: list[tuple[int, str, bool]]) -> tuple[Life, ...]:
    groups: list[list[tuple[int, str]]] = []
    for at, queue, fresh in access:
        if fresh or not groups:
            groups.append([])
        groups[-1].append((at, queue))
    return tuple(Life(g[0][0], g[-1][0], tuple({queue: at for at, queue in g}.items())) for g in groups)


def check_handovers(program: Program, plan: Plan, lives: dict[str, tuple[Life, ...]]) -> None:
    """The plan's hand-overs are those its places give, and every one is ordered by its chains. Raises PlanRefused."""
    given: dict[tuple[str, str, str], Handover] = {}
    for handover in plan.handovers:
        born = handover.chains[0][-1] if handover.chains and handover.chains[0] else ""
        key = (handover.early, handover.late, f"{born}/{handover.start}")
        if key in given:
            raise PlanRefused(f"the plan hands over bytes from {handover.early} to {handover.late} at {born!r} twice")
        given[key] = handover
    at = {step.name: i for i, step in enumerate(program.steps)}
    for early, late, start, stop, one, two in _actual(plan, lives):
        born = program.steps[two.first].name if two.first >= 0 else "start"
        found = given.pop((early, late, f"{born}/{start}"), None)
        if found is None or found.stop != stop:
            raise PlanRefused(
                f"overlap of {early} and {late}: {late} takes bytes [{start:,}, {stop:,}) over at step {born}, and the plan "
                f"has no certificate of it; plan this program again"
            )
        _follow(program, at, found, (one, two))
    if given:
        early, late, _ = min(given)
        raise PlanRefused(f"overlap of {early} and {late}: the plan has a certificate, but its places give no such hand-over")


def _actual(plan: Plan, lives: dict[str, tuple[Life, ...]]) -> list[tuple[str, str, int, int, Life, Life]]:
    """Every hand-over by the places: lives in the order of their first write, each painted over what held its bytes."""
    places = [place for place in plan.places if place.kind == "reusable"]
    births = sorted(
        ((life.first, k, place, life) for k, place in enumerate(places) for life in lives[place.buffer]),
        key=lambda birth: birth[:2],
    )
    canvas: Canvas[tuple[str, Life]] = Canvas()
    found = []
    for _, _, place, life in births:
        seen: dict[tuple[str, int], tuple[int, int, Life]] = {}
        for start, stop, (holder, held) in canvas.under(place.offset, place.stop):
            if holder != place.buffer:
                low, high, _ = seen.get((holder, held.first), (start, stop, held))
                seen[holder, held.first] = (min(low, start), max(high, stop), held)
        found += [(name, place.buffer, a, b, held, life) for (name, _), (a, b, held) in seen.items()]
        canvas.paint(place.offset, place.stop, (place.buffer, life))
    return found


def _follow(program: Program, at: dict[str, int], handover: Handover, lives: tuple[Life, Life]) -> None:
    """Each chain leads from the last use of one life in its queue to the first write of the other, link by link."""
    (one, two), pair = lives, f"overlap of {handover.early} and {handover.late}"
    if one.last >= two.first:
        raise PlanRefused(f"{pair}: {handover.late} is written before {handover.early} is used for the last time")
    wanted = sorted(program.steps[position].name for queue, position in one.ends if queue) or ["start"]
    if sorted(chain[0] for chain in handover.chains if chain) != wanted or len(handover.chains) != len(wanted):
        raise PlanRefused(
            f"{pair}: its chains begin at {[list(c[:1]) for c in handover.chains]}, the last uses of {handover.early} are "
            f"{wanted}; steps without a chain may run at the same time as {program.steps[two.first].name}"
        )
    for chain in handover.chains:
        if chain[-1] != program.steps[two.first].name:
            raise PlanRefused(f"{pair}: a chain ends at {chain[-1]}, not at {program.steps[two.first].name}")
        for a, b in itertools.pairwise(chain):
            if a == "start" and b in at and chain[0] == a and wanted == ["start"]:
                continue
            linked = a in at and b in at and at[a] < at[b]
            if not linked or not (program.steps[at[a]].queue == program.steps[at[b]].queue or a in program.steps[at[b]].after):
                raise PlanRefused(f"{pair}: nothing orders step {a} before step {b}, a link of its certificate")

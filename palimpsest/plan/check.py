"""The independent checker: replays the steps, paints bytes, and refuses a plan that is unsafe or says something untrue.

It shares no code with the placer or with lifetimes: liveness is re-derived by painting bytes (``replay``), every other
statement of the plan from the program and the places alone.
"""

import itertools
from collections import Counter

from palimpsest.core.errors import BadConfig, PlanRefused
from palimpsest.core.spec import KINDS, Program
from palimpsest.plan.links import check_handovers, lives_of
from palimpsest.plan.plan import Place, Plan
from palimpsest.plan.replay import byte_range, clocks_of, replay, shared_bytes, unordered

#: what a refusal of bytes tells the user to do
_REMEDY = "plan this program again (palimpsest plan), or restore the order of steps the plan was made for"


def check(program: Program, plan: Plan, *, index_bits: int = 64) -> None:
    """Return when ``plan`` is a safe and truthful plan of ``program``; raise PlanRefused otherwise.

    index_bits: width of the signed integer in which kernels form byte offsets inside a segment, 32 or 64.
    Bytes are replayed before the program's digest is compared, so that a plan used with another order is refused for
    what would break.
    """
    if index_bits not in (32, 64):
        raise BadConfig(f"index_bits is {index_bits!r}; it is 32 or 64")
    _check_places(program, plan)
    _check_segments(plan)
    _check_apart(plan)
    _check_index(plan, index_bits)
    _check_bytes(program, plan)
    _check_pins(plan)
    _check_histories(program, plan)
    _check_claims(program, plan)


def _check_places(program: Program, plan: Plan) -> None:
    """Every buffer once, with its own size and alignment, in a segment that holds it."""
    names = [place.buffer for place in plan.places]
    wanted = {b.name: b for b in program.all_buffers}
    for name, count in Counter(names).items():
        if name not in wanted:
            raise PlanRefused(f"the plan places {name}, which program {program.name} does not declare; plan this program again")
        if count > 1:
            raise PlanRefused(f"the plan places {name} {count} times; once is wanted")
    placed = set(names)
    missing = [name for name in wanted if name not in placed]
    if missing:
        raise PlanRefused(
            f"the plan does not place {', '.join(missing[:4])} ({len(missing)} of {len(wanted)} buffers); plan this program again"
        )
    for place in plan.places:
        buffer = wanted[place.buffer]
        for what, found, right in (
            ("kind", place.kind, buffer.kind), ("bytes", place.nbytes, buffer.nbytes), ("alignment", place.align, buffer.align),
        ):  # fmt: skip
            if found != right:
                raise PlanRefused(f"the plan gives {place.buffer} {what} {found}; program {program.name} declares {right}")
        if place.nbytes < 1 or place.align < 1:
            raise PlanRefused(f"{place.buffer} has {place.nbytes} bytes and alignment {place.align}; both must be positive")
        if place.offset < 0 or place.offset % place.align:
            raise PlanRefused(f"{place.buffer} lies at offset {place.offset}; a multiple of {place.align}, 0 or more, is wanted")


def _check_segments(plan: Plan) -> None:
    """One segment per kind in use, in the fixed order, that ends where its last buffer ends (or at the next aligned byte)."""
    used = [kind for kind in KINDS if any(place.kind == kind for place in plan.places)]
    if [segment.kind for segment in plan.segments] != used:
        raise PlanRefused(f"the plan has segments {[s.kind for s in plan.segments]}; its places need {used}")
    for segment in plan.segments:
        inside = [place for place in plan.places if place.kind == segment.kind]
        last = max(inside, key=lambda place: place.stop)
        unit = max(place.align for place in inside)
        if last.stop > segment.nbytes:
            raise PlanRefused(
                f"{last.buffer} needs bytes {byte_range(last)} but the {segment.kind} segment has {segment.nbytes:,} bytes"
            )
        if segment.nbytes >= last.stop + unit:
            raise PlanRefused(
                f"the {segment.kind} segment has {segment.nbytes:,} bytes but its last buffer {last.buffer} ends at "
                f"{last.stop:,}; {segment.nbytes - last.stop:,} bytes serve nobody"
            )


def _check_apart(plan: Plan) -> None:
    """Bytes that outlive the program, or that peers touch, are never shared."""
    for kind in KINDS:
        if kind == "reusable":
            continue
        inside = sorted((place for place in plan.places if place.kind == kind), key=lambda place: place.offset)
        for low, high in itertools.pairwise(inside):
            if low.stop > high.offset:
                raise PlanRefused(
                    f"{low.buffer} {byte_range(low)} and {high.buffer} {byte_range(high)} share {shared_bytes(low, high):,} "
                    f"bytes of the {kind} segment; only reusable buffers may share"
                )


def _check_index(plan: Plan, index_bits: int) -> None:
    largest = (1 << (index_bits - 1)) - 1
    beyond = [place for place in plan.places if place.stop - 1 > largest]
    if beyond:
        worst = max(beyond, key=lambda place: place.nbytes)
        raise PlanRefused(
            f"{worst.buffer} ends at byte offset {worst.stop - 1:,} of the {worst.kind} segment, above {largest:,}, the "
            f"largest a {index_bits}-bit kernel offset can hold; prepare fewer tokens or rows, or use 64-bit kernel offsets"
        )


def _check_bytes(program: Program, plan: Plan) -> None:
    """Replay in program order, then show that no allowed schedule differs. Refuses with the largest fault."""
    places = {place.buffer: place for place in plan.places if place.kind == "reusable"}
    faults = replay(program, places) + unordered(program, plan)
    if faults:
        worst = max(faults, key=lambda fault: fault.shared)
        more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
        raise PlanRefused(f"unsafe plan of {program.name}: {worst.text}{more}; {_REMEDY}")


def _check_pins(plan: Plan) -> None:
    """Every place somebody asked for is kept."""
    at = {place.buffer: place.offset for place in plan.places}
    for pin in plan.pins:
        wanted = pin.offset + (at.get(pin.base, -1) if pin.base else 0)
        if at.get(pin.buffer) != wanted:
            behind = f" behind {pin.base}" if pin.base else ""
            raise PlanRefused(f"{pin.buffer} is pinned to {pin.offset:,}{behind}, but the plan puts it at {at.get(pin.buffer)}")


def _check_histories(program: Program, plan: Plan) -> None:
    """Histories that share bytes need a step of scope ``all`` between them when there are several ranks; ``off`` means apart."""
    at = {place.buffer: place for place in plan.places}
    shown: list[tuple[Place, Place]] = []
    for early, late in zip(program.histories[::2], program.histories[1::2], strict=False):
        one, two = at[early], at[late]
        shared = shared_bytes(one, two)
        if shared <= 0 or one.kind != "reusable" or two.kind != "reusable":
            continue
        if plan.reuse == "off":
            both = f"{one.buffer} {byte_range(one)} and {two.buffer} {byte_range(two)}"
            raise PlanRefused(f"the plan says reuse off, but {both} share {shared:,} bytes")
        shown.append((one, two))
    if program.limits.ranks > 1 and shown:
        _check_barriers(program, shown)


def _check_barriers(program: Program, pairs: list[tuple[Place, Place]]) -> None:
    """Between every two users of the histories of a pair, a step of scope ``all`` ordered after one and before the other."""
    clocks, end = clocks_of(program), len(program.steps)
    touched: dict[str, list[int]] = {place.buffer: [] for pair in pairs for place in pair}
    for name, positions in touched.items():
        if name in program.inputs:
            positions.append(-1)
    for i, step in enumerate(program.steps):
        for name in dict.fromkeys(name for _, name in step.accesses() if name in touched):
            touched[name].append(i)
    for name, positions in touched.items():
        if name in program.outputs:
            positions.append(end)
    fences = [i for i, step in enumerate(program.steps) if step.scope == "all"]

    def ordered(i: int, j: int) -> bool:
        if i < 0 or j == end:
            return i < j
        return i != j and clocks[j].get(program.steps[i].queue, 0) >= clocks[i][program.steps[i].queue]

    for one, two in pairs:
        users = sorted((i, place.buffer) for place in (one, two) for i in touched[place.buffer])
        for i, a in reversed(users):
            for j, b in users:
                if a != b and i < j and not any(ordered(i, k) and ordered(k, j) for k in fences):
                    raise PlanRefused(
                        f"step {_name(program, j)} touches {b} on bytes that step {_name(program, i)} uses for {a}, and no step "
                        f"that all {program.limits.ranks} ranks must reach lies between: {one.buffer} {byte_range(one)} and "
                        f"{two.buffer} {byte_range(two)} share {shared_bytes(one, two):,} bytes; put a barrier between them"
                    )


def _check_claims(program: Program, plan: Plan) -> None:
    """Everything else the plan says is what the program and the places imply."""
    lives, end = lives_of(program), len(program.steps)
    for place in plan.places:
        begin, last = (lives[place.buffer][0].first, lives[place.buffer][-1].last) if place.kind == "reusable" else (-1, end)
        wanted = (_name(program, begin), _name(program, last), begin + 1, last + 1)
        if (place.first, place.last, place.begin, place.end) != wanted:
            raise PlanRefused(
                f"the plan says {place.buffer} lives from {place.first} to {place.last}; it lives from {wanted[0]} to "
                f"{wanted[1]}, steps {wanted[2]} to {wanted[3]}, not {place.begin} to {place.end}"
            )
    check_handovers(program, plan, lives)
    bound = _live_peak(program)
    if plan.lower_bound > plan.peak or plan.lower_bound != bound:
        raise PlanRefused(
            f"the plan states a lower bound of {plan.lower_bound:,} bytes and a peak of {plan.peak:,}; the steps give {bound:,}"
        )
    if plan.reuse not in ("on", "off"):
        raise PlanRefused(f"the plan has reuse {plan.reuse!r}; it is 'on' or 'off'")
    for what, found, right in (
        ("limits", plan.limits, program.limits), ("program name", plan.program, program.name),
        ("program digest", plan.program_digest, program.digest),
    ):  # fmt: skip
        if found != right:
            raise PlanRefused(f"the plan was made for {what} {found}; this program has {right}; plan this program again")


def _name(program: Program, position: int) -> str:
    if position < 0:
        return "start"
    return "end" if position == len(program.steps) else program.steps[position].name


def _live_peak(program: Program) -> int:
    """Largest sum of reusable bytes needed at once in program order, walking backwards from the outputs."""
    reusable = {b.name: b for b in program.all_buffers if b.kind == "reusable"}
    units = [b.align for b in reusable.values()]
    unit = max((u for u in range(1, min(units, default=1) + 1) if all(align % u == 0 for align in units)), default=1)
    size = {name: -(-b.nbytes // unit) * unit for name, b in reusable.items()}
    needed = {name for name in program.outputs if name in reusable}
    peak = sum(size[name] for name in needed)
    for step in reversed(program.steps):
        access = [(kind, name) for kind, name in step.accesses() if name in reusable]
        peak = max(peak, sum(size[name] for name in needed | {name for _, name in access}))
        needed -= {name for kind, name in access if kind == "write"}
        needed |= {name for kind, name in access if kind != "write"}
    inputs = {name for name in program.inputs if name in reusable}
    return max(peak, sum(size[name] for name in needed | inputs))

"""A naive second opinion for tiny programs: run every schedule on real bytes, and try every placement."""

import itertools

from palimpsest.core.spec import Program


def schedules(made: Program):
    """Every order of step positions that queues and events allow."""
    needs = {
        i: {j for j in range(i) if made.steps[j].queue == s.queue or made.steps[j].name in s.after}
        for i, s in enumerate(made.steps)
    }

    def extend(done: tuple[int, ...]):
        if len(done) == len(needs):
            yield done
        for i, need in needs.items():
            if i not in done and need <= set(done):
                yield from extend((*done, i))

    return list(extend(()))


def safe(made: Program, offsets: dict[str, int]) -> bool:
    """Whether every schedule reads in shared bytes what it would read if every buffer had bytes of its own."""
    orders = schedules(made)
    size = {b.name: b.nbytes for b in made.all_buffers if b.kind == "reusable"}
    for order in orders:
        apart = _run(made, order, size, None)
        if apart is None or _run(made, order, size, offsets) != apart:
            return False
    return not _concurrent_clash(made, orders, size, offsets)


def _concurrent_clash(made: Program, orders, size, offsets) -> bool:
    for i, j in itertools.combinations(range(len(made.steps)), 2):
        if len({order.index(i) < order.index(j) for order in orders}) == 2:
            for (ka, a), (kb, b) in itertools.product(made.steps[i].accesses(), made.steps[j].accesses()):
                if set(_cells(a, size, offsets)) & set(_cells(b, size, offsets)) and not (a == b and ka == kb == "read"):
                    return True
    return False


def _cells(name, size, offsets):
    start = offsets[name] if offsets else 0
    return range(start, start + size[name])


def _run(made: Program, order, size, offsets):
    """What each read sees, byte by byte; None when a step needs two buffers on one byte, or reads what nobody wrote."""
    memory, seen = {}, []

    def key(name, cell):
        return cell if offsets else (name, cell)

    def see(name):
        seen.append(tuple(memory.get(key(name, c)) for c in _cells(name, size, offsets)))

    def put(name, token):
        for i, c in enumerate(_cells(name, size, offsets)):
            memory[key(name, c)] = (name, token, i)

    for name in made.inputs:
        put(name, "start")
    for name in made.inputs:
        see(name)
    for i in order:
        access = made.steps[i].accesses()
        if offsets:
            used = [c for name in {n for _, n in access} for c in _cells(name, size, offsets)]
            if len(used) > len(set(used)):
                return None
        for kind, name in access:
            if kind != "write":
                see(name)
        for kind, name in access:
            if kind != "read":
                put(name, i)
    for name in made.outputs:
        see(name)
    return seen


def best_peak(made: Program, unit: int) -> int:
    """The smallest end of any safe placement at multiples of ``unit``; exponential."""
    size = {b.name: b.nbytes for b in made.all_buffers if b.kind == "reusable"}
    slots = {name: -(-n // unit) for name, n in size.items()}
    total = sum(slots.values())
    for peak in range(max(slots.values()), total + 1):
        choices = [range(peak - slots[name] + 1) for name in size]
        for pick in itertools.product(*choices):
            if safe(made, dict(zip(size, (p * unit for p in pick), strict=True))):
                return peak * unit
    return total * unit

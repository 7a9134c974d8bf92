"""Seeded random programs, many a second: legal by construction, up to three queues, and the violations planted in their plans."""

import dataclasses
import random

from plan_cases import buffer, program, step

from palimpsest.core.spec import Limits, Program
from palimpsest.plan.plan import Plan


def random_program(seed: int, most_steps: int = 10, most_buffers: int = 9) -> Program:
    """No undefined read and no race on one buffer; events between queues wherever that needs them, and some more."""
    draw = random.Random(seed)
    queues, names = draw.choice([1, 1, 2, 3]), [f"b{i}" for i in range(draw.randint(1, most_buffers))]
    sizes = {n: draw.randint(1, 90) for n in names}
    align = draw.choice([1, 16, 32])
    inputs = tuple(n for n in names if draw.random() < 0.15)
    written, steps = set(inputs), []
    touched: dict[str, list[tuple[int, str]]] = {n: [] for n in names}
    for i in range(draw.randint(1, most_steps)):
        queue = f"q{draw.randrange(queues)}"
        after = {steps[draw.randrange(i)].name} if i and queues > 1 and draw.random() < 0.4 else set()
        access = {}
        for name in draw.sample(names, min(len(names), draw.randint(1, 3))):
            access[name] = draw.choice(["read", "read", "update", "write"]) if name in written else "write"
        for name, kind in access.items():
            for j, before in touched[name]:
                if steps[j].queue != queue and (kind, before) != ("read", "read"):
                    after.add(steps[j].name)
            touched[name].append((i, kind))
            written.add(name)
        words = {f"{kind}s": " ".join(n for n, k in access.items() if k == kind) for kind in ("read", "write", "update")}
        scratch = draw.choice([0, 0, 0, 40])
        scope = "all" if draw.random() < 0.2 else "rank"
        steps.append(step(f"s{i}", **words, scratch=scratch, queue=queue, after=tuple(sorted(after)), scope=scope))
    used = [n for n in names if n in written]
    outputs = tuple(n for n in used if draw.random() < 0.2)
    pair = tuple(draw.sample(used, 2)) if len(used) > 1 and draw.random() < 0.4 else ()
    return program(
        [buffer(n, sizes[n], align) for n in used], steps, inputs=inputs, outputs=outputs, histories=pair,
        limits=Limits(64, 16, draw.choice([1, 2])),
    )  # fmt: skip


def violations(made: Program, plan: Plan, seed: int):
    """Plans that are each wrong in one way, with what was done. Every one must be refused."""
    draw = random.Random(seed)
    reusable = [p for p in plan.places if p.kind == "reusable"]
    pairs = [(a, b) for a in reusable for b in reusable if a.buffer < b.buffer]

    def moved(name: str, **changes) -> Plan:
        return dataclasses.replace(
            plan, places=tuple(dataclasses.replace(p, **changes) if p.buffer == name else p for p in plan.places)
        )

    one = draw.choice(reusable)
    yield "size", moved(one.buffer, nbytes=one.nbytes + 1)
    yield "outside", moved(one.buffer, offset=plan.peak // one.align * one.align + one.align)
    yield "bound", dataclasses.replace(plan, lower_bound=plan.lower_bound + 1)
    yield "digest", dataclasses.replace(plan, program_digest="0" * 64)
    yield "claim", moved(one.buffer, begin=one.begin + 1)
    if plan.handovers:
        k = draw.randrange(len(plan.handovers))
        hand, rest = plan.handovers[k], (*plan.handovers[:k], *plan.handovers[k + 1 :])
        yield "certificate dropped", dataclasses.replace(plan, handovers=rest)
        yield "chain emptied", dataclasses.replace(plan, handovers=(*rest, dataclasses.replace(hand, chains=())))
        early = next(p for p in plan.places if p.buffer == hand.early)
        if early.first != hand.chains[0][0]:
            forged = dataclasses.replace(hand, chains=((early.first, hand.chains[0][-1]), *hand.chains[1:]))
            yield "chain from an earlier use", dataclasses.replace(plan, handovers=(*rest, forged))
    together = [{name for _, name in step.accesses()} for step in made.steps]
    met = [(a, b) for a, b in pairs if any({a.buffer, b.buffer} <= names for names in together)]
    for a, b in draw.sample(met, min(3, len(met))):
        if a.offset % b.align == 0:
            yield "used in one step", moved(b.buffer, offset=a.offset)

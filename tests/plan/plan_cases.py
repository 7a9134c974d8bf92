"""Programs for the tests of ``plan``: the real K3.1-Pro layer, small hand-written ones, and random ones."""

from hypothesis import strategies as st

from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.recipes.blocks import layer_program

FULL = tuple("full" if i % 4 == 3 or i == 92 else "linear" for i in range(93))
K31 = Geometry(
    "kimi_k31", "kimi-k3.1-pro", 7168, 93, 96, 1536, 512, 128, Rope("none", 64), 128, 192**-0.5, 1e-6, True,
    Indexer(32, 128, 2048, "none", 0, 1e-5), FULL, 1 << 20,
)  # fmt: skip
SMALL = Limits(64, 16, 1)


def k31_program(tokens: int = 1 << 20, rows: int = 4096, ranks: int = 16) -> Program:
    return layer_program(K31, Limits(tokens, rows, ranks), Formats(), 3)


def buffer(name: str, nbytes: int, align: int = 16, kind: str = "reusable") -> Buffer:
    return Buffer(name, kind, (Plane(name, "u8", (nbytes,), ("fixed",)),), str(nbytes), align)


def step(name: str, reads: str = "", writes: str = "", updates: str = "", **more) -> Step:
    """``step("s", reads="a b", writes="c")``: buffer names as words."""
    roles = {"reads": reads, "writes": writes, "updates": updates}
    return Step(name, "op", "p0", **{k: tuple((f"{k}{i}", n) for i, n in enumerate(v.split())) for k, v in roles.items()}, **more)


def program(buffers: list[Buffer], steps: list[Step], **more) -> Program:
    return Program("t", more.pop("limits", SMALL), tuple(buffers), tuple(steps), **more)


def swapped(made: Program) -> Program:
    """The two gathers in each other's place."""
    by = {s.name: s for s in made.steps}
    trade = {"gather_index": "gather_latent", "gather_latent": "gather_index"}
    return made.with_steps(tuple(by[trade.get(s.name, s.name)] for s in made.steps))


def latent_first(made: Program) -> Program:
    """The latent gather moved right before the index gather."""
    by, order = {s.name: s for s in made.steps}, []
    for s in made.steps:
        if s.name == "gather_index":
            order.append(by["gather_latent"])
        if s.name != "gather_latent":
            order.append(s)
    return made.with_steps(tuple(order))


@st.composite
def programs(draw, queues: int = 1, most_steps: int = 8, most_buffers: int = 7):
    """A legal program: no undefined read, no race on one buffer; several queues get the events that needs."""
    count = draw(st.integers(1, most_buffers))
    sizes = draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    align = draw(st.sampled_from([1, 16, 32]))
    names = [f"b{i}" for i in range(count)]
    inputs = tuple(n for n in names if draw(st.integers(0, 5)) == 0)
    written, steps = set(inputs), []
    touched: dict[str, list[tuple[int, str]]] = {n: [] for n in names}
    for i in range(draw(st.integers(1, most_steps))):
        queue, after, access = f"q{draw(st.integers(0, queues - 1))}", set(), {}
        for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
            access[name] = draw(st.sampled_from(["read", "update", "write"])) if name in written else "write"
        for name, kind in access.items():
            for j, before in touched[name]:
                if steps[j].queue != queue and (kind, before) != ("read", "read"):
                    after.add(steps[j].name)
            touched[name].append((i, kind))
            written.add(name)
        words = {f"{kind}s": " ".join(n for n, k in access.items() if k == kind) for kind in ("read", "write", "update")}
        scratch = draw(st.sampled_from([0, 0, 0, 40])) if queues == 1 else 0
        steps.append(step(f"s{i}", **words, scratch=scratch, queue=queue, after=tuple(sorted(after))))
    used = [n for n in names if n in written]
    outputs = tuple(n for n in used if draw(st.integers(0, 4)) == 0)
    return program([buffer(n, s, align) for n, s in zip(names, sizes, strict=True) if n in used], steps,
                   inputs=inputs, outputs=outputs)  # fmt: skip

"""Fill a session's weights and tables: from a checkpoint's tensors, or deterministic random ones for tests.

A filler is called once in ``prepare``, before the seal, with the arena of its rank. What it writes is the rank's part: which
rows, heads and columns is decided by the recipe's ``weight_slices``; here is only copying, with one conversion that rounds to
nearest even.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from palimpsest.checkpoint.index import Checkpoint
from palimpsest.checkpoint.load import Reader
from palimpsest.core.errors import BadCheckpoint, BadConfig
from palimpsest.ranks.comm import Comm
from palimpsest.recipes.weights import WeightSlice
from palimpsest.run.arena import Arena

#: fills the weights and tables of one rank
Filler = Callable[[Arena, Comm], None]
#: rank, ranks -> buffer name -> the part of a tensor that the rank keeps
Slices = Callable[[int, int], Mapping[str, WeightSlice]]

#: weights cut by heads, and the axis that holds them
HEAD_AXIS = {"w.q_b": 0, "w.uk": 0, "w.uv": 0, "w.gate": 0, "w.o": 1}


def from_checkpoint(checkpoint: Checkpoint, slices: Slices, tables: Mapping[str, Sequence[float]], *, scope: str = "") -> Filler:
    """A filler that reads a checkpoint.

    slices: e.g. ``lambda rank, ranks: weight_slices(geometry, layer, rank, ranks, prefix)``
    tables: table buffer -> its fp32 values, e.g. ``recipes.tables(geometry)``
    scope:  beginning of tensor names under which every fp8 scale must have been used, e.g. the layer's; empty: none is checked
    Raises BadCheckpoint for a missing tensor, a wrong shape and an unused scale, BadConfig for a weight without a source.
    """

    def fill(arena: Arena, comm: Comm) -> None:
        parts = slices(comm.rank, comm.size)
        wanted = [b.name for b in arena.program.buffers if b.kind == "weights"]
        if set(wanted) != set(parts):
            lacking, spare = sorted(set(wanted) - set(parts)), sorted(set(parts) - set(wanted))
            raise BadConfig(f"program {arena.program.name}: weights without a source {lacking}, sources without a buffer {spare}")
        with Reader(checkpoint) as reader:
            for tensor, names in _by_tensor(parts, wanted).items():
                whole = reader.read(tensor)
                for name in names:
                    put(arena.view(name), whole, parts[name])
            unused = reader.unconsumed_scales(scope) if scope else ()
        if unused:
            raise BadCheckpoint(f"{len(unused)} scales under {scope} were not used, first {unused[0]}; run: palimpsest preflight")
        fill_tables(arena, tables)

    return fill


def _by_tensor(parts: Mapping[str, WeightSlice], names: Iterable[str]) -> dict[str, list[str]]:
    """Each tensor once, however many buffers are cut from it."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(parts[name].tensor, []).append(name)
    return found


def put(view: torch.Tensor, whole: torch.Tensor, part: WeightSlice) -> None:
    """Copy ``part`` of the tensor ``whole`` into ``view``; a narrower ``view`` rounds to nearest even. Raises BadCheckpoint."""
    if tuple(whole.shape) != part.source:
        found, expected = list(whole.shape), list(part.source)
        raise BadCheckpoint(f"tensor {part.tensor} has shape {found}, expected {expected}; is it another model's?")
    cut = whole.reshape(part.view)[tuple(slice(*span) for span in part.ranges)]
    assert tuple(view.shape) == part.shape, (part, view.shape)
    view.copy_(cut.reshape(part.shape))


def fill_tables(arena: Arena, tables: Mapping[str, Sequence[float]]) -> None:
    """Write the ``table`` buffers. Raises BadConfig when the program's tables and ``tables`` differ in names or lengths."""
    wanted = {b.name: b.planes[0].shape for b in arena.program.buffers if b.kind == "table"}
    if {name: (len(values),) for name, values in tables.items()} != wanted:
        raise BadConfig(f"tables { ({n: len(v) for n, v in tables.items()}) } given; program {arena.program.name} has {wanted}")
    for name, values in tables.items():
        arena.view(name).copy_(torch.tensor(values, dtype=torch.float64))


def synthetic(seed: int, tables: Mapping[str, Sequence[float]] | None = None) -> Filler:
    """A filler of deterministic random weights: the same model whatever the rank count.

    Matrices are normal with variance 1/columns, norm weights near 1, biases near 0. Each tensor has its own generator, seeded
    by its name.
    """

    def fill(arena: Arena, comm: Comm) -> None:
        for buffer in arena.program.buffers:
            if buffer.kind == "weights":
                _random(arena.view(buffer.name), buffer.name, seed, comm)
        fill_tables(arena, tables or {})

    return fill


def _random(view: torch.Tensor, name: str, seed: int, comm: Comm) -> None:
    word = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(word)
    shape, axis = list(view.shape), HEAD_AXIS.get(name)
    if axis is not None:
        shape[axis] *= comm.size
    whole = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) == 1:
        whole.mul_(0.125).add_(0.0 if name.endswith("bias") else 1.0)
    else:
        whole.mul_(shape[-1] ** -0.5)
    if axis is not None:
        whole = whole.narrow(axis, comm.rank * view.shape[axis], view.shape[axis])
    view.copy_(whole)

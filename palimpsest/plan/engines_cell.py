"""One number of another engine: bytes, the formula they come from, the version and file it was read in, and who plans them.

A formula is arithmetic over the symbols printed beside it, with ``r256(x)`` = x rounded up to 256 and ``MiB`` = 2**20; what
follows ``where`` names a part of it. A test evaluates every formula and compares it with the number.
"""

import dataclasses
from dataclasses import dataclass, field

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Limits
from palimpsest.core.units import align_up

MIB = 1 << 20
#: ``named``: a slot the engine plans or reserves. ``hidden``: a kernel wrapper or the caching allocator takes it unseen.
KINDS = ("named", "hidden", "not computable")
#: columns of the comparison, in order; an engine may have other slots, which only the details show
SLOTS = ("index gather", "latent gather", "logits", "ids", "exchange", "total")


@dataclass(frozen=True)
class Cell:
    """One slot of one engine on one rank.

    nbytes:  bytes, or None when ``kind`` is ``not computable``; then ``note`` is the reason
    formula: expression over ``symbols``; empty when not computable
    source:  file (and function) of that version in which the formula was read
    """

    slot: str
    nbytes: int | None
    kind: str
    formula: str = ""
    symbols: tuple[tuple[str, int], ...] = ()
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"kind {self.kind!r}"
        assert (self.nbytes is None) == (self.kind == "not computable") == (not self.formula), f"{self.slot}: {self}"
        assert self.nbytes is not None or self.note, f"{self.slot} is not computable and says not why"


@dataclass(frozen=True)
class EngineBill:
    """What one engine would allocate. ``overlap`` says whether its histories share bytes, and what makes that safe."""

    engine: str
    version: str
    overlap: str
    cells: tuple[Cell, ...]

    def cell(self, slot: str) -> Cell:
        """The cell of a slot. Raises KeyError."""
        for cell in self.cells:
            if cell.slot == slot:
                return cell
        raise KeyError(f"{self.engine} has no slot {slot!r}; it has {[c.slot for c in self.cells]}")


@dataclass(frozen=True)
class Deployment:
    """What a comparison needs beyond model and limits; each engine's own default unless the caller knows better.

    vocab:         vocabulary size; None when the configuration is not at hand
    device_bytes:  memory of one device, and ``free_bytes`` what is free on it when the first prefill runs; None: unknown
    static_percent: SGLang's mem_fraction_static in percent
    batches:       lmdeploy's max_batch_size
    ubatch:        llama.cpp's n_ubatch
    """

    vocab: int | None = None
    device_bytes: int | None = None
    free_bytes: int | None = None
    static_percent: int = 88
    batches: int = 128
    ubatch: int = 512

    def __post_init__(self) -> None:
        for name, least in (("static_percent", 1), ("batches", 1), ("ubatch", 1)):
            if getattr(self, name) < least:
                raise BadConfig(f"{name} is {getattr(self, name)}; at least {least} is wanted")
        if self.static_percent > 100:
            raise BadConfig(f"static_percent is {self.static_percent}; it is a share of the device, at most 100")
        if self.device_bytes is not None and self.free_bytes is not None and self.free_bytes > self.device_bytes:
            raise BadConfig(f"free memory {self.free_bytes:,} B exceeds the device's {self.device_bytes:,} B")


@dataclass(frozen=True)
class Ask:
    """The symbols of every formula, on one rank, for one request at full prepared context.

    L: prepared context, N: live context of the step (= L here), T: rows of a step, h: attention heads of this rank,
    W: ranks, K: top-k, H: index heads, I: index dims, D: latent dims, V: latent dims without the rotary ones
    """

    L: int
    N: int
    T: int
    h: int
    W: int
    K: int
    H: int = 64
    I: int = 128  # noqa: E741
    D: int = 576
    V: int = 512
    deployment: Deployment = field(default_factory=Deployment)

    def pick(self, names: str) -> tuple[tuple[str, int], ...]:
        """Pairs (symbol, value) of one-letter symbols, for a cell."""
        return tuple((name, getattr(self, name)) for name in names.split())


def ask(geometry: Geometry, limits: Limits, deployment: Deployment | None = None) -> Ask:
    """The symbols of ``geometry`` at ``limits``; the vocabulary is the geometry's own unless ``deployment`` has one.

    Raises Unsupported when the ranks do not divide the heads.
    """
    if geometry.heads % limits.ranks:
        raise Unsupported(f"{limits.ranks} ranks do not divide the {geometry.heads} heads of {geometry.name}")
    ix, known = geometry.indexer, deployment or Deployment()
    if known.vocab is None and geometry.body is not None:
        known = dataclasses.replace(known, vocab=geometry.body.vocab)
    return Ask(
        L=limits.tokens, N=limits.tokens, T=limits.rows, h=geometry.heads // limits.ranks, W=limits.ranks, K=ix.topk,
        H=ix.heads, I=ix.dim, D=geometry.latent_dim, V=geometry.kv_lora, deployment=known,
    )  # fmt: skip


def r256(count: int) -> int:
    """``count`` rounded up to 256."""
    return align_up(count, 256)


def unknown(slot: str, why: str, source: str = "") -> Cell:
    """A cell that cannot be computed, with the reason."""
    return Cell(slot, None, "not computable", source=source, note=why)

"""A sheet on which a whole-model program is written down: buffers and steps in order, and how each weight is stored.

Only used while a program is built; the Program it becomes is frozen.
"""

from typing import Any

from palimpsest.core.contract import OpContract
from palimpsest.core.errors import UnknownName
from palimpsest.core.geometry import Formats, Geometry
from palimpsest.core.spec import Buffer, Limits, Plane, Step
from palimpsest.core.units import ceil_div, dtype_bytes
from palimpsest.recipes.tensors import EXPERT, FP32, LINEAR, Weight, body_of

#: how the weights lie in memory; ``checkpoint`` means as the checkpoint stores them
STORAGES = ("checkpoint", "bf16", "fp8", "mxfp4")
#: rows and columns of one fp8 block when the checkpoint does not say, and elements of one MXFP4 group
FP8_BLOCK = (128, 128)
MXFP4_GROUP = 32
#: (row, slot) pairs of one pass over the experts, rounded down to whole rows
EXPERT_PAIRS = 16_384


class Sheet:
    """Buffers and steps of one program in the making.

    at: what is prepended to the names of new buffers and steps, such as ``layer007.``
    """

    def __init__(self, geometry: Geometry, limits: Limits, formats: Formats, storage: str, expert_pairs: int = EXPERT_PAIRS):
        self.geometry, self.limits, self.formats = geometry, limits, formats
        self.body = body_of(geometry)
        self.storage = resolve_storage(geometry, storage)
        self.act = formats.activation
        self.expert_pairs = expert_pairs
        self.at = ""
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []

    def buffer(self, name: str, dtype: str, shape: dict[str, int], formula: str, kind: str = "reusable") -> str:
        """Declare a buffer of one plane; ``shape`` maps ``axis`` or ``axis:label`` to a size. Returns its full name."""
        axes = tuple(axis.split(":")[0] for axis in shape)
        full = self.at + name
        self.buffers.append(Buffer(full, kind, (Plane(name, dtype, tuple(shape.values()), axes),), formula))
        return full

    def rows(self, name: str, width: int, dtype: str = "", *, of: str = "") -> str:
        """A reusable buffer of one row of ``width`` elements per query row, in the activation dtype by default."""
        dtype = dtype or self.act
        shape = {"rows": self.limits.rows, "fixed": width}
        return self.buffer(name, dtype, shape, f"rows x {of or width} x {dtype_bytes(dtype)}")

    def step(self, contract: OpContract, name: str, phase: str, roles: dict[str, str], **params: Any) -> None:
        """Append a step; ``roles`` maps the contract's roles to full buffer names."""
        self.steps.append(contract.step(self.at + name, phase, roles, **params))

    def weights(self, table: tuple[Weight, ...]) -> None:
        """Declare the weight buffers of a table; ``kv_b`` becomes the two buffers the attention steps read."""
        for weight in table:
            if weight.role == "kv_b":
                self.buffers += self._key_values(weight)
            else:
                planes = stored_planes(weight, self.limits.ranks, self.storage, self.formats.weights, self._block)
                self._weight(weight.role, planes)

    def w(self, role: str) -> str:
        """Full name of a weight buffer."""
        return f"{self.at}w.{role}"

    @property
    def _block(self) -> tuple[int, int]:
        return self.geometry.block_fp8 if self.geometry.block_fp8[0] else FP8_BLOCK

    def _weight(self, role: str, planes: tuple[Plane, ...]) -> None:
        self.buffers.append(Buffer(self.w(role), "weights", planes, weight_formula(planes)))

    def _key_values(self, weight: Weight) -> list[Buffer]:
        """uk and uv are rows of one tensor whose scale blocks may hold rows of both, so all its scales lie with uk."""
        g, heads = self.geometry, weight.share(self.limits.ranks) // weight.unit
        planes = stored_planes(weight, self.limits.ranks, self.storage, self.formats.weights, self._block)
        found = []
        for role, size, rest in (("uk", g.nope, planes[1:]), ("uv", g.v_dim, ())):
            own = (Plane(role, planes[0].dtype, (heads, size, g.kv_lora), ("fixed",) * 3), *rest)
            found.append(Buffer(self.w(role), "weights", own, weight_formula(own)))
        return found


def resolve_storage(geometry: Geometry, storage: str) -> str:
    """``bf16``, ``fp8`` or ``mxfp4``: what ``checkpoint`` means for this model. Raises UnknownName."""
    if storage not in STORAGES:
        raise UnknownName("weight storage", storage, STORAGES)
    if storage != "checkpoint":
        return storage
    if geometry.block_fp8[0]:
        return "fp8"
    return body_of(geometry).expert_format


def stored_planes(weight: Weight, ranks: int, storage: str, plain: str, block: tuple[int, int]) -> tuple[Plane, ...]:
    """Planes of one rank's part of a weight: its values, then its scales when the storage has any.

    fp8:   linear and expert weights in e4m3, one fp32 scale per block of ``block`` rows and columns
    mxfp4: expert weights two to a byte, one e8m0 byte per group of MXFP4_GROUP columns; everything else ``plain``
    """
    local = weight.local(ranks)
    copies = (weight.copies,) if weight.copies > 1 else ()

    def plane(name: str, dtype: str, *shape: int) -> Plane:
        shape = copies + shape
        return Plane(name, dtype, shape, ("fixed",) * len(shape))

    if weight.form == FP32:
        return (plane(weight.role, "fp32", *local),)
    if storage == "fp8" and weight.form in (LINEAR, EXPERT):
        scales = tuple(weight.blocks(ranks, axis, block[axis]) for axis in (0, 1))
        return (plane(weight.role, "e4m3", *local), plane("scales", "fp32", *scales))
    if storage == "mxfp4" and weight.form == EXPERT:
        groups = weight.blocks(ranks, 1, MXFP4_GROUP)
        return (plane(weight.role, "u8", local[0], ceil_div(local[1], 2)), plane("scales", "u8", local[0], groups))
    return (plane(weight.role, plain, *local),)


def weight_formula(planes: tuple[Plane, ...]) -> str:
    """``"896 x 192 x 1792 x 1 + scales 896 x 192 x 112 x 1"``: each plane's shape and element bytes."""
    parts = [" x ".join(map(str, (*p.shape, dtype_bytes(p.dtype)))) for p in planes]
    return " + scales ".join(parts)

"""Weight bytes of one rank, exactly, from the safetensors headers of a checkpoint: the cuts of ``tensors`` on real shapes.

Nothing is guessed. A tensor whose name or shape is not the one the model should have is counted whole on every rank and named;
one the model should have and the headers lack is named as missing; layers for next-token prediction are named and not counted: no
step uses them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from palimpsest.core.geometry import Geometry
from palimpsest.core.spec import Limits
from palimpsest.core.units import ceil_div
from palimpsest.recipes.sheet import FP8_BLOCK, MXFP4_GROUP
from palimpsest.recipes.tensors import Weight, body_of, layer_weights, outer_weights

_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)", re.ASCII)
_EXPERT = re.compile(r"\.experts\.(\d{1,7})\.", re.ASCII)
#: ends of names beside ``.weight``: block scales, packed values and their group scales
_SUFFIXES = (("weight_scale_inv", "scale"), ("weight_packed", "packed"), ("weight_scale", "group"))
#: tensors some exporters store although nothing multiplies with them
_HARMLESS = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class HeaderWeights:
    """Weight bytes of one checkpoint.

    per_rank:   resident bytes of the rank with the largest share
    stored:     bytes of all tensors in the files
    replicated: bytes of ``per_rank`` that every rank holds whole
    groups:     (part of the model, bytes per rank), adding up to ``per_rank``
    unknown:    (name, bytes, why) counted whole on every rank
    unused:     names not counted: next-token-prediction layers and tables nobody reads
    missing:    names the model has and the headers do not, ``*`` for experts
    """

    per_rank: int
    stored: int
    replicated: int
    groups: tuple[tuple[str, int], ...]
    unknown: tuple[tuple[str, int, str], ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]


def weights_from_headers(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], geometry: Geometry, limits: Limits, prefix: str = "model."
) -> HeaderWeights:
    """Weight bytes per rank of a checkpoint whose ``tensors`` map a name to (dtype, shape, bytes).

    ``prefix`` stands before ``layers.<N>.`` in its names (``recipes.resolve_prefix``). Raises Unsupported for a configuration
    without a whole model's fields.
    """
    body_of(geometry)
    reader = _Reader(geometry, limits.ranks, prefix)
    for name, (_, shape, nbytes) in tensors.items():
        reader.add(name, shape, nbytes)
    return reader.result()


class _Reader:
    def __init__(self, geometry: Geometry, ranks: int, prefix: str):
        self.geometry, self.ranks, self.prefix = geometry, ranks, prefix
        layers = [{w.tensor: w for w in layer_weights(geometry, layer)} for layer in range(geometry.layers)]
        self.layers: list[dict[str, Weight]] = layers
        self.outer = {w.tensor: w for w in outer_weights(geometry)}
        self.stored = self.replicated = 0
        self.groups: dict[str, int] = {}
        self.unknown: list[tuple[str, int, str]] = []
        self.unused: list[str] = []
        self.seen: dict[tuple[int, str], set[int]] = {}

    def add(self, name: str, shape: tuple[int, ...], nbytes: int) -> None:
        self.stored += nbytes
        inside = _LAYER.fullmatch(name[len(self.prefix) :]) if name.startswith(self.prefix) else None
        if name.endswith(_HARMLESS) or (inside and int(inside[1]) >= self.geometry.layers):
            self.unused.append(name)
            return
        layer = int(inside[1]) if inside else -1
        table, rest = (self.layers[layer], inside[2]) if inside else (self.outer, self._outside(name))
        expert = _EXPERT.search(rest)
        pattern = _EXPERT.sub(".experts.*.", rest)
        pattern, part = _part(pattern)
        weight = table.get(pattern)
        if weight is None:
            self._whole(name, nbytes, "the model has no such tensor")
        elif expert and int(expert[1]) >= weight.copies:
            self._whole(name, nbytes, f"the model has experts 0..{weight.copies - 1}")
        elif (share := self._share(weight, part, shape)) is None:
            self._whole(name, nbytes, f"shape {list(shape)} is not that of {list(weight.shape)}")
        else:
            count = nbytes * share[0] // share[1]
            self.replicated += nbytes if weight.split is None else 0
            self._count(_group(pattern), count)
            if part in ("value", "packed"):
                self.seen.setdefault((layer, pattern), set()).add(int(expert[1]) if expert else 0)

    def _outside(self, name: str) -> str:
        """A name outside the layers, without whatever stands before it."""
        if name == "lm_head.weight" or name.endswith(".lm_head.weight"):
            return "lm_head.weight"
        return name[len(self.prefix) :] if name.startswith(self.prefix) else name

    def _share(self, weight: Weight, part: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """(elements of one rank, elements stored) along the axis that is cut; None for a shape that does not fit."""
        block = _blocks_of(self.geometry, weight, part, shape)
        wanted = tuple(ceil_div(size, each) for size, each in zip(weight.shape, block, strict=True))
        padded = weight.split is not None and weight.stored and shape == (weight.stored,)
        if shape != wanted and not padded:
            return None
        if weight.split is None:
            return 1, 1
        return weight.blocks(self.ranks, weight.split, block[weight.split]), shape[weight.split]

    def _whole(self, name: str, nbytes: int, why: str) -> None:
        self.unknown.append((name, nbytes, why))
        self.replicated += nbytes
        self._count("not understood", nbytes)

    def _count(self, group: str, nbytes: int) -> None:
        self.groups[group] = self.groups.get(group, 0) + nbytes

    def result(self) -> HeaderWeights:
        return HeaderWeights(
            per_rank=sum(self.groups.values()),
            stored=self.stored,
            replicated=self.replicated,
            groups=tuple(sorted(self.groups.items(), key=lambda item: (-item[1], item[0]))),
            unknown=tuple(self.unknown),
            unused=tuple(self.unused),
            missing=tuple(self._missing()),
        )

    def _missing(self) -> Iterable[str]:
        for layer, table in [(-1, self.outer), *enumerate(self.layers)]:
            at = "" if layer < 0 else f"layers.{layer}."
            for pattern, weight in table.items():
                found = len(self.seen.get((layer, pattern), ()))
                if found < weight.copies:
                    many = f" ({weight.copies - found} of {weight.copies} experts)" if weight.copies > 1 else ""
                    yield f"{self.prefix}{at}{pattern}{many}"


def _part(pattern: str) -> tuple[str, str]:
    """The weight's own name and which part of it is stored: ``value``, ``scale``, ``packed`` or ``group``."""
    for end, part in _SUFFIXES:
        if pattern.endswith(f".{end}"):
            return f"{pattern.removesuffix(end)}weight", part
    return pattern, "value"


def _blocks_of(geometry: Geometry, weight: Weight, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of the weight that one stored element stands for, per axis."""
    one = (1,) * len(weight.shape)
    if len(weight.shape) != 2 or len(shape) != 2 or part == "value":
        return one
    if part == "packed":
        return (1, 2)
    if part == "group":
        return (1, MXFP4_GROUP)
    return geometry.block_fp8 if geometry.block_fp8[0] else FP8_BLOCK


def _group(pattern: str) -> str:
    for mark, group in (
        (".experts.", "routed experts"),
        ("shared_experts.", "shared experts"),
        (".indexer.", "indexer"),
        ("self_attn.", "attention"),
        ("embed_tokens", "embedding and head"),
        ("lm_head", "embedding and head"),
        ("routed_expert", "latent projections"),
        ("gate.weight", "routers"),
        ("e_score_correction_bias", "routers"),
        ("mlp.", "dense MLP"),
    ):
        if mark in pattern:
            return group
    return "norms"

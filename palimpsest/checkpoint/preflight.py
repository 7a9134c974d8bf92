"""Does a checkpoint hold exactly the tensors the recipe will use, and what will run? Headers only: no tensor byte is read.

Every check here exists because an engine once loaded such a folder silently and computed something else: a dropped scale, a
missing shard, an indexer on a layer that shares ids, a layer list counted from 1, a norm without its bias.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from palimpsest.checkpoint.config import remote_code
from palimpsest.checkpoint.header import TensorRef
from palimpsest.checkpoint.index import Checkpoint
from palimpsest.checkpoint.strict import shown
from palimpsest.core.geometry import Geometry
from palimpsest.core.units import ceil_div

SCALE_SUFFIX = "_scale_inv"
#: stored dtypes of a weight that needs no scale
PLAIN = ("BF16", "F32", "F16")
#: stored dtypes of a block scale
SCALES = ("F32", "F8_E8M0")
FP8 = "F8_E4M3"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.", re.ASCII)
_INDEXER = ".indexer."
#: tensors some exporters store although nothing multiplies with them
_HARMLESS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class WeightNames:
    """What the recipe asks of the checkpoint.

    required:  layer -> tensor name -> shape, for every layer that attends sparsely
    forbidden: layer -> beginnings of tensor names that must not be there
    """

    required: Mapping[int, Mapping[str, tuple[int, ...]]]
    forbidden: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        attention_tensors: Callable[[Geometry, int], Mapping[str, tuple[int, ...]]],
        forbidden_tensors: Callable[[Geometry, int], Iterable[str]],
    ) -> "WeightNames":
        """Ask a recipe's two functions for every layer."""
        required = {layer: dict(attention_tensors(geometry, layer)) for layer in geometry.sparse_layers}
        forbidden = {layer: tuple(forbidden_tensors(geometry, layer)) for layer in range(geometry.layers)}
        return cls(required, forbidden)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (``error``) or odd (``warning``): which tensor, what is there, what was expected, what to do."""

    level: str
    tensor: str
    found: str
    expected: str
    step: str

    def __str__(self) -> str:
        return f"{self.level}: {shown(self.tensor, 160)[1:-1]}: {self.found}, expected {self.expected}; {self.step}"


@dataclass(frozen=True)
class PreflightReport:
    """Findings, errors first, and the facts of what will run, in reading order."""

    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "facts": dict(self.facts), "findings": [asdict(finding) for finding in self.findings]}


def preflight(checkpoint: Checkpoint, geometry: Geometry, weight_names: WeightNames) -> PreflightReport:
    """Compare the headers of ``checkpoint`` with what the recipe will read. Never raises for a wrong checkpoint: it reports."""
    findings = [
        *_schedule(geometry),
        *_indexer_layers(checkpoint, geometry),
        *_required(checkpoint, geometry, weight_names),
        *_forbidden(checkpoint, geometry, weight_names),
        *_scales(checkpoint, geometry),
        *_unused(checkpoint, weight_names),
        *(
            Finding("warning", checkpoint.root.name, note, "only files and tensors of the index", "remove it if it is a leftover")
            for note in checkpoint.notes
        ),
    ]
    # the first check to see a tensor words it best
    distinct: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        distinct.setdefault((finding.tensor, finding.found), finding)
    ordered = sorted(distinct.values(), key=lambda finding: finding.level != "error")
    return PreflightReport(tuple(ordered), _facts(checkpoint, geometry))


def _error(tensor: str, found: str, expected: str, step: str) -> Finding:
    return Finding("error", tensor, found, expected, step)


def _schedule(geometry: Geometry) -> list[Finding]:
    """The layer schedule must select somewhere, and a shared layer needs ids to share."""
    found: list[Finding] = []
    name = f"{geometry.name} schedule"
    if len(geometry.schedule) != geometry.layers:
        found.append(
            _error(
                name,
                f"{len(geometry.schedule)} entries",
                f"one for each of {geometry.layers} layers",
                "correct the layer list in config.json",
            )
        )
    if not geometry.full_layers:
        found.append(
            _error(
                name,
                "0 layers that select",
                "at least 1",
                "without an indexer layer attention would run dense; check the layer list in config.json",
            )
        )
    elif early := [layer for layer in geometry.sparse_layers if layer < geometry.full_layers[0]]:
        found.append(
            _error(
                name,
                f"layer {early[0]} is shared and the first full layer is {geometry.full_layers[0]}",
                "a full layer before every shared one",
                "check indexer_types or index_topk_freq and its offset in config.json",
            )
        )
    return found


def _layer_of(tensor: str) -> int | None:
    match = _LAYER.search(tensor)
    return int(match[1]) if match and len(match[1]) < 7 else None


def _indexer_layers(checkpoint: Checkpoint, geometry: Geometry) -> list[Finding]:
    """Layers that hold indexer tensors must be the layers that run an indexer; say so in one line when the list is off by one."""
    held = {
        layer
        for tensor in checkpoint.tensors
        if _INDEXER in tensor and (layer := _layer_of(tensor)) is not None and layer < geometry.layers
    }
    wanted = set(geometry.full_layers)
    if held == wanted or not held:
        return []
    for shift in (1, -1):
        if (
            held == {layer + shift for layer in wanted if layer + shift < geometry.layers}
            and max(wanted) + shift <= geometry.layers
        ):
            step = (
                f"the layer list of config.json is off by {shift}: full_attn_layers counts from 1, 0-based layer 3 is written 4"
            )
            return [_error("indexer layers", _listed(held), _listed(wanted), step)]
    extra, missing = held - wanted, wanted - held
    words = "; ".join(
        text for text in (f"{_listed(extra)} too many" if extra else "", f"{_listed(missing)} missing" if missing else "") if text
    )
    return [
        _error(
            "indexer layers",
            f"{_listed(held)} ({words})",
            _listed(wanted),
            "config.json and the weights are of different models, or the layer list is wrong",
        )
    ]


def _listed(layers: Iterable[int]) -> str:
    layers = sorted(layers)
    shown_layers = ", ".join(map(str, layers[:12])) + (f", ... {layers[-1]}" if len(layers) > 12 else "")
    return f"layers {shown_layers}"


def _required(checkpoint: Checkpoint, geometry: Geometry, names: WeightNames) -> list[Finding]:
    found: list[Finding] = []
    for layer, tensors in names.required.items():
        for tensor, shape in tensors.items():
            ref = checkpoint.tensors.get(tensor)
            if ref is None:
                kind = geometry.schedule[layer]
                found.append(
                    _error(tensor, "absent", f"{list(shape)} on {kind} layer {layer}", _missing_step(tensor, checkpoint))
                )
                continue
            if ref.shape != tuple(shape):
                found.append(
                    _error(
                        tensor,
                        f"shape {list(ref.shape)}",
                        f"{list(shape)} from config.json",
                        "config.json and the weights disagree",
                    )
                )
            found += _dtype(tensor, ref)
    return found


def _missing_step(tensor: str, checkpoint: Checkpoint) -> str:
    if tensor.endswith("k_norm.bias"):
        return "the index key norm is a LayerNorm with bias; an RMS norm without one computes something else"
    packed = [tensor.removesuffix(".weight") + suffix for suffix in (".weight_packed", ".qweight")]
    if any(name in checkpoint.tensors for name in packed):
        return "it is stored packed, which is not supported for attention; use a bf16 or block-fp8 checkpoint"
    layer = _layer_of(tensor)
    if not any(_layer_of(name) == layer for name in checkpoint.tensors):
        return f"no tensor of layer {layer} is there: a shard is missing, or config.json has more layers than the weights"
    return "download the checkpoint again, or correct config.json"


def _dtype(tensor: str, ref: TensorRef) -> list[Finding]:
    matrix = len(ref.shape) == 2 and tensor.endswith(".weight")
    if ref.dtype in PLAIN or (matrix and ref.dtype == FP8):
        return []
    legal = ", ".join((*PLAIN, FP8) if matrix else PLAIN)
    return [_error(tensor, f"dtype {ref.dtype}", legal, "use a bf16 or block-fp8 checkpoint")]


def _forbidden(checkpoint: Checkpoint, geometry: Geometry, names: WeightNames) -> list[Finding]:
    found: list[Finding] = []
    by_layer: dict[int, list[str]] = {}
    for tensor in checkpoint.tensors:
        if (layer := _layer_of(tensor)) is not None:
            by_layer.setdefault(layer, []).append(tensor)
    for layer, forbidden in names.forbidden.items():
        kind = geometry.schedule[layer]
        for tensor in by_layer.get(layer, ()):
            if kind != "full" and _INDEXER in tensor:
                step = "check indexer_types (or the 1-based layer list) in config.json"
                found.append(_error(tensor, "present", f"no indexer on {kind} layer {layer}", step))
            elif tensor.startswith(forbidden):
                step = "the recipe would ignore it and compute something else; check the layer list and family in config.json"
                found.append(_error(tensor, "present", f"absent on {kind} layer {layer}", step))
    return found


def _scales(checkpoint: Checkpoint, geometry: Geometry) -> list[Finding]:
    """Every fp8 weight has one scale of the right shape; every scale has one fp8 weight."""
    found: list[Finding] = []
    rows, columns = geometry.block_fp8
    for tensor, ref in checkpoint.tensors.items():
        if ref.dtype == FP8 and tensor.endswith(".weight"):
            found += _scale_of(checkpoint, tensor, ref, (rows, columns))
        elif tensor.endswith(SCALE_SUFFIX):
            weight = checkpoint.tensors.get(tensor.removesuffix(SCALE_SUFFIX))
            if weight is None:
                found.append(
                    _error(
                        tensor,
                        "a scale without its weight",
                        "the fp8 weight of that name",
                        "a shard is missing or the tensor was renamed",
                    )
                )
            elif weight.dtype != FP8:
                found.append(
                    _error(
                        tensor,
                        f"a scale of a {weight.dtype} weight, so it is never used",
                        f"{FP8} weight or no scale",
                        "the weight was converted without removing its scale, or the scale was meant to be applied",
                    )
                )
    return found


def _scale_of(checkpoint: Checkpoint, tensor: str, ref: TensorRef, block: tuple[int, int]) -> list[Finding]:
    name = tensor + SCALE_SUFFIX
    scale = checkpoint.tensors.get(name)
    if scale is None:
        return [
            _error(
                name,
                "absent",
                f"the block scale of {FP8} weight {list(ref.shape)}",
                "without it raw fp8 codes would be used as values",
            )
        ]
    if not all(block):
        return [
            _error(
                tensor,
                f"dtype {FP8}",
                "a weight_block_size in config.json",
                "add quantization_config with weight_block_size, e.g. [128, 128]",
            )
        ]
    if len(ref.shape) != 2:
        return [
            _error(
                tensor,
                f"shape {list(ref.shape)}",
                "two dimensions for a block-quantised weight",
                "use a bf16 or block-fp8 checkpoint",
            )
        ]
    shape = (ceil_div(ref.shape[0], block[0]), ceil_div(ref.shape[1], block[1]))
    found = []
    if scale.shape != shape:
        found.append(
            _error(
                name,
                f"shape {list(scale.shape)}",
                f"{list(shape)} for weight {list(ref.shape)} in blocks of {list(block)}",
                "the scale belongs to another weight or block size",
            )
        )
    if scale.dtype not in SCALES:
        found.append(_error(name, f"dtype {scale.dtype}", " or ".join(SCALES), "store the scale as fp32"))
    return found


def _unused(checkpoint: Checkpoint, names: WeightNames) -> list[Finding]:
    """Tensors beside the required ones that nothing will read: a bias the recipe does not add would change results silently."""
    required = {tensor for tensors in names.required.values() for tensor in tensors}
    modules = {tensor.rsplit(".", 1)[0] for tensor in required}
    found = []
    for tensor in checkpoint.tensors:
        if tensor in required or tensor.removesuffix(SCALE_SUFFIX) in required or tensor.endswith(_HARMLESS):
            continue
        if tensor.rsplit(".", 1)[0] in modules:
            step = "the recipe does not use it, so results would silently differ; check the family in config.json"
            found.append(_error(tensor, "present", "absent", step))
    return found


def _facts(checkpoint: Checkpoint, geometry: Geometry) -> dict[str, Any]:
    indexer, rope = geometry.indexer, geometry.rope
    kinds = {
        kind: [layer for layer, have in enumerate(geometry.schedule) if have == kind] for kind in ("full", "shared", "linear")
    }
    dtypes = sorted({ref.dtype for tensor, ref in checkpoint.tensors.items() if ".self_attn." in tensor})
    return {
        "model": geometry.name,
        "family": geometry.family,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "layers": geometry.layers,
        "selecting_layers": kinds["full"],
        "shared_layers": kinds["shared"],
        "linear_layers": kinds["linear"],
        "heads": geometry.heads,
        "index_heads": indexer.heads,
        "index_dim": indexer.dim,
        "topk": indexer.topk,
        "attention_rope": f"{rope.layout}, {rope.dims} dims" + (f", theta {rope.theta:g}" if rope.layout != "none" else ""),
        "index_rope": f"{indexer.rope_layout}" + (f", first {indexer.rope_dims} dims" if indexer.rope_layout != "none" else ""),
        "index_key_norm": f"LayerNorm eps {indexer.norm_eps:g}",
        "latent_norm": f"RMSNorm eps {geometry.latent_norm_eps:g}",
        "index_scale": indexer.scale_format,
        "hadamard": indexer.hadamard,
        "output_gate": geometry.output_gate,
        "latent_format": geometry.latent_format,
        "weight_block": list(geometry.block_fp8) if all(geometry.block_fp8) else None,
        "attention_dtypes": dtypes,
        "remote_code": list(remote_code(dict(checkpoint.config))),
    }

"""Checkpoint tensors of one attention sublayer: names, shapes, what may not be there, and which part of each a rank holds.

Names and cuts only; ``run`` applies them with torch. A name is ``<prefix>layers.<N>.self_attn.<suffix>``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from palimpsest.core.errors import BadCheckpoint, Unsupported
from palimpsest.core.geometry import Geometry

#: buffer name without ``w.`` -> tensor suffix; the spelling every supported family shares
ATTENTION_NAMES = {
    "q_a": "q_a_proj.weight",
    "q_a_norm": "q_a_layernorm.weight",
    "q_b": "q_b_proj.weight",
    "kv_a": "kv_a_proj_with_mqa.weight",
    "kv_a_norm": "kv_a_layernorm.weight",
    "uk": "kv_b_proj.weight",
    "uv": "kv_b_proj.weight",
    "o": "o_proj.weight",
}
INDEX_NAMES = {
    "index_q": "indexer.wq_b.weight",
    "index_k": "indexer.wk.weight",
    "index_k_norm": "indexer.k_norm.weight",
    "index_k_norm_bias": "indexer.k_norm.bias",
    "index_w": "indexer.weights_proj.weight",
}


@dataclass(frozen=True)
class WeightSlice:
    """The part of a checkpoint tensor that one rank keeps in one buffer: ``tensor.reshape(view)[ranges].reshape(shape)``.

    tensor: full name in the checkpoint
    source: shape the checkpoint tensor must have
    view:   ``source`` with its rows split, e.g. [heads, nope + v, kv_lora]; same elements, same order
    ranges: one half-open range per axis of ``view``
    shape:  shape of the buffer's plane
    """

    tensor: str
    source: tuple[int, ...]
    view: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    def rectangles(self) -> tuple[tuple[int, int, int, int], ...]:
        """Half-open (row, row end, column, column end) parts of ``source``, in the order that stacks them into the buffer.

        A vector counts as one row per element and one column. For loaders that dequantise by blocks of the whole tensor.
        """
        if len(self.view) == 1:
            return ((*self.ranges[0], 0, 1),)
        if len(self.view) == 2:
            return ((*self.ranges[0], *self.ranges[1]),)
        (h0, h1), (r0, r1), (c0, c1) = self.ranges
        step = self.view[1]
        if (r0, r1) == (0, step):
            return ((h0 * step, h1 * step, c0, c1),)
        return tuple((h * step + r0, h * step + r1, c0, c1) for h in range(h0, h1))


def sparse_names(geometry: Geometry, layer: int) -> dict[str, str]:
    """Buffer name (without ``w.``) -> tensor suffix of 0-based ``layer``. Raises Unsupported for a linear layer."""
    if not 0 <= layer < geometry.layers or geometry.schedule[layer] == "linear":
        raise Unsupported(
            f"layer {layer} of {geometry.name} has no sparse attention; sparse layers are "
            f"{', '.join(map(str, geometry.sparse_layers[:8]))}{', ...' if len(geometry.sparse_layers) > 8 else ''}"
        )
    return ATTENTION_NAMES | (INDEX_NAMES if geometry.schedule[layer] == "full" else {})


def tensor_shapes(geometry: Geometry, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Tensor suffix -> shape, for the names a family declares."""
    g, ix = geometry, geometry.indexer
    shapes = {
        "q_a": (g.q_lora, g.hidden),
        "q_a_norm": (g.q_lora,),
        "q_b": (g.heads * (g.nope + g.rope.dims), g.q_lora),
        "kv_a": (g.latent_dim, g.hidden),
        "kv_a_norm": (g.kv_lora,),
        "uk": (g.heads * (g.nope + g.v_dim), g.kv_lora),
        "uv": (g.heads * (g.nope + g.v_dim), g.kv_lora),
        "o": (g.hidden, g.heads * g.v_dim),
        "gate": (g.heads * g.v_dim, g.hidden),
        "index_q": (ix.heads * ix.dim, g.q_lora),
        "index_k": (ix.dim, g.hidden),
        "index_k_norm": (ix.dim,),
        "index_k_norm_bias": (ix.dim,),
        "index_w": (ix.heads, g.hidden),
    }
    return {suffix: shapes[buffer] for buffer, suffix in names.items()}


def cut(geometry: Geometry, buffer: str, tensor: str, source: tuple[int, ...], heads: tuple[int, int]) -> WeightSlice:
    """The part of ``tensor`` that a rank with heads [heads[0], heads[1]) keeps in buffer ``w.<buffer>``."""
    g, (h0, h1) = geometry, heads
    whole = tuple((0, size) for size in source)
    qk, kv, n = g.nope + g.rope.dims, g.nope + g.v_dim, h1 - h0
    if buffer == "q_b":
        return WeightSlice(tensor, source, (g.heads, qk, g.q_lora), (heads, (0, qk), (0, g.q_lora)), (n * qk, g.q_lora))
    if buffer == "uk":
        return WeightSlice(tensor, source, (g.heads, kv, g.kv_lora), (heads, (0, g.nope), (0, g.kv_lora)), (n, g.nope, g.kv_lora))
    if buffer == "uv":
        return WeightSlice(
            tensor, source, (g.heads, kv, g.kv_lora), (heads, (g.nope, kv), (0, g.kv_lora)), (n, g.v_dim, g.kv_lora)
        )
    if buffer == "gate":
        return WeightSlice(tensor, source, source, ((h0 * g.v_dim, h1 * g.v_dim), (0, g.hidden)), (n * g.v_dim, g.hidden))
    if buffer == "o":
        return WeightSlice(tensor, source, source, ((0, g.hidden), (h0 * g.v_dim, h1 * g.v_dim)), (g.hidden, n * g.v_dim))
    return WeightSlice(tensor, source, source, whole, source)


def full_name(prefix: str, layer: int, suffix: str) -> str:
    """``<prefix>layers.<layer>.self_attn.<suffix>``."""
    return f"{prefix}layers.{layer}.self_attn.{suffix}"


def forbidden(geometry: Geometry, layer: int, prefix: str, names: dict[str, str]) -> tuple[str, ...]:
    """Beginnings of tensor names that must not exist in ``layer``: using the checkpoint while ignoring them would be wrong.

    An indexer where none runs, a bias no step adds, a gate no step applies, an uncompressed query projection.
    """
    suffixes = []
    if geometry.schedule[layer] != "full":
        suffixes.append("indexer.")
    if geometry.schedule[layer] != "linear":
        known = dict.fromkeys(names.values())
        biases = [name.removesuffix("weight") + "bias" for name in known if name.endswith(".weight")]
        suffixes += [bias for bias in biases if bias not in known]
        suffixes += ["q_proj."] + ([] if "gate" in names else ["g_proj."])
    return tuple(full_name(prefix, layer, suffix) for suffix in dict.fromkeys(suffixes))


def find_prefix(geometry: Geometry, prefixes: tuple[str, ...], tensors: Iterable[str]) -> str:
    """The one of ``prefixes`` under which a checkpoint's ``tensors`` hold the first sparse layer. Raises BadCheckpoint."""
    present = set(tensors)
    layer = geometry.sparse_layers[0]
    wanted = [full_name(prefix, layer, ATTENTION_NAMES["kv_a"]) for prefix in prefixes]
    found = [prefix for prefix, name in zip(prefixes, wanted, strict=True) if name in present]
    if len(found) != 1:
        held = "several of" if found else "none of"
        raise BadCheckpoint(
            f"the checkpoint holds {held} {', '.join(wanted)}; exactly one must name the first sparse layer of {geometry.name}"
        )
    return found[0]

"""Reading a Hugging Face ``config.json``: every value is checked, every refusal names the field and what is supported.

The dictionary comes from a stranger. Nothing here guesses: a field that would change the arithmetic is understood or refused.
"""

from collections.abc import Mapping
from typing import Any

from palimpsest.core.errors import BadConfig, Unsupported
from palimpsest.core.geometry import SCALE_FORMATS, Indexer

#: layers and every other size above these are refused before anything is built from them
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
#: values one fp8 index scale covers
INDEX_SCALE_BLOCK = 128

#: the flat spelling of the indexer's fields, and the ones accepted inside ``dsa_config``
_INDEX_FIELDS = {
    "heads": ("index_n_heads", ("index_n_heads", "n_heads")),
    "dim": ("index_head_dim", ("index_head_dim", "head_dim")),
    "topk": ("index_topk", ("index_topk", "topk", "top_k")),
    "hadamard": ("index_hadamard", ("index_hadamard", "hadamard")),
    "scale_format": ("index_scale_fmt", ("index_scale_fmt", "scale_fmt")),
}
#: 1-based lists of the layers with an indexer, as ``linear_attn_config`` numbers them
_DSA_LAYERS = ("layers", "dsa_layers", "full_attn_layers")


class Fields:
    """One JSON object with typed access; ``where`` is its place in the file, for messages."""

    def __init__(self, data: Any, where: str):
        if not isinstance(data, Mapping):
            raise BadConfig(f"{where} must be a JSON object, not {_kind(data)}")
        self.data = data
        self.where = where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.data.get(name) is not None

    def get(self, name: str) -> Any:
        if not self.has(name):
            raise BadConfig(f"{self.path(name)} is missing from the configuration; add it or use a complete config.json")
        return self.data[name]

    def whole(self, name: str, *, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer in [least, most]. Raises BadConfig."""
        if default is not None and not self.has(name):
            return default
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise BadConfig(f"{self.path(name)} = {_shown(value)} must be a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 1e-30, most: float = 1e30) -> float:
        """A number in [least, most]. Raises BadConfig."""
        if default is not None and not self.has(name):
            return default
        value = self.get(name)
        if type(value) not in (int, float) or not least <= value <= most:
            raise BadConfig(f"{self.path(name)} = {_shown(value)} must be a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; absent and null mean ``default``. Raises BadConfig."""
        if not self.has(name):
            return default
        value = self.data[name]
        if type(value) is not bool:
            raise BadConfig(f"{self.path(name)} = {_shown(value)} must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises BadConfig."""
        if default is not None and not self.has(name):
            return default
        value = self.get(name)
        if not isinstance(value, str):
            raise BadConfig(f"{self.path(name)} = {_shown(value)} must be a string")
        return value

    def listed(self, name: str, kind: type, most: int = MAX_LAYERS) -> list[Any]:
        """A list of at most ``most`` strings or integers. Raises BadConfig."""
        value = self.get(name)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise BadConfig(f"{self.path(name)} must be a list of {'strings' if kind is str else 'whole numbers'}")
        if kind is int and any(abs(item) > MAX_SIZE for item in value):
            raise BadConfig(f"{self.path(name)} holds a number beyond {MAX_SIZE}")
        if len(value) > most:
            raise BadConfig(f"{self.path(name)} has {len(value)} entries; at most {most} are supported")
        return value

    def inner(self, name: str) -> "Fields":
        """The object under ``name``. Raises BadConfig."""
        return Fields(self.get(name), self.path(name))


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits
        return "a value too long to print"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def attention_sizes(fields: Fields) -> dict[str, int]:
    """The sizes every MLA config spells the same way. Raises BadConfig for a missing value or heads that disagree."""
    refuse_set(fields, "attention_bias", "biases on the attention projections")
    refuse_set(fields, "sliding_window", "a sliding window")
    sizes = {
        "hidden": fields.whole("hidden_size"),
        "layers": fields.whole("num_hidden_layers", most=MAX_LAYERS),
        "heads": fields.whole("num_attention_heads"),
        "q_lora": _query_rank(fields),
        "kv_lora": fields.whole("kv_lora_rank"),
        "nope": fields.whole("qk_nope_head_dim"),
        "v_dim": fields.whole("v_head_dim"),
        "max_context": fields.whole("max_position_embeddings"),
    }
    kv_heads = fields.whole("num_key_value_heads", default=sizes["heads"])
    if kv_heads != sizes["heads"]:
        raise BadConfig(
            f"{fields.path('num_key_value_heads')} = {kv_heads} but {fields.path('num_attention_heads')} = {sizes['heads']}; "
            "latent attention has one latent for all heads, so both must be equal"
        )
    return sizes


def _query_rank(fields: Fields) -> int:
    if not fields.has("q_lora_rank"):
        raise Unsupported(
            f"{fields.path('q_lora_rank')} is null or missing: the indexer reads the query latent, so a query without one is "
            "not supported; supported models have q_lora_rank 1536 or 2048"
        )
    return fields.whole("q_lora_rank")


def rope_dims(fields: Fields, nope: int) -> int:
    """``qk_rope_head_dim``, even, agreeing with ``qk_head_dim`` when that is given. Raises BadConfig."""
    dims = fields.whole("qk_rope_head_dim")
    if dims % 2:
        raise BadConfig(f"{fields.path('qk_rope_head_dim')} = {dims} must be even: rotary dims come in pairs")
    if fields.has("qk_head_dim") and fields.whole("qk_head_dim") != nope + dims:
        raise BadConfig(
            f"{fields.path('qk_head_dim')} = {fields.data['qk_head_dim']} but qk_nope_head_dim {nope} + qk_rope_head_dim {dims} "
            f"= {nope + dims}"
        )
    return dims


def refuse_set(fields: Fields, name: str, what: str) -> None:
    """Refuse a field that would change the arithmetic unless it is absent, null, false or zero."""
    if fields.data.get(name):
        raise Unsupported(
            f"{fields.path(name)} = {_shown(fields.data[name])}: {what} is not supported; it must be absent or false"
        )


def read_indexer(fields: Fields, *, rope_layout: str, rope_dims: int, norm_eps: float, scale_format: str = "ue8m0") -> Indexer:
    """The indexer, spelled ``dsa_config: {...}`` or flat (``index_n_heads`` ...); both at once must agree.

    ``scale_format`` applies when neither spelling carries one. Raises Unsupported when the configuration has no indexer at all.
    """
    nested = fields.inner("dsa_config") if fields.has("dsa_config") else None
    if nested is not None:
        known = {key for _, inside in _INDEX_FIELDS.values() for key in inside} | set(_DSA_LAYERS)
        unknown = sorted(set(map(str, nested.data)) - known)
        if unknown:
            raise Unsupported(
                f"{nested.path(unknown[0])} is not understood, so what the indexer computes is not known; "
                f"understood: {', '.join(sorted(known))}"
            )
    found = {field: _index_value(fields, nested, field) for field in _INDEX_FIELDS}
    for field, (flat, _) in _INDEX_FIELDS.items():
        if field in ("heads", "dim", "topk") and found[field] is None:
            raise Unsupported(
                f"{fields.path(flat)} is missing: without an indexer attention would be dense, and nothing here runs dense; "
                "give dsa_config {index_n_heads, index_head_dim, index_topk} or the same fields flat"
            )
    heads, dim, topk = (_size(fields, _INDEX_FIELDS[f][0], found[f]) for f in ("heads", "dim", "topk"))
    indexer = Indexer(
        heads=heads, dim=dim, topk=topk, rope_layout=rope_layout, rope_dims=rope_dims if rope_layout != "none" else 0,
        norm_eps=norm_eps, hadamard=_hadamard(fields, found["hadamard"]),
        scale_format=scale_format if found["scale_format"] is None else found["scale_format"],
    )  # fmt: skip
    _check_indexer(fields, indexer)
    return indexer


def _index_value(fields: Fields, nested: Fields | None, field: str) -> Any:
    flat, inside = _INDEX_FIELDS[field]
    spelled = [(fields.path(flat), fields.data[flat])] if fields.has(flat) else []
    if nested is not None:
        spelled += [(nested.path(name), nested.data[name]) for name in inside if nested.has(name)]
    for path, value in spelled[1:]:
        if value != spelled[0][1] or type(value) is not type(spelled[0][1]):
            raise BadConfig(f"{spelled[0][0]} = {_shown(spelled[0][1])} but {path} = {_shown(value)}; keep one of them")
    return spelled[0][1] if spelled else None


def _size(fields: Fields, name: str, value: Any) -> int:
    return Fields({name: value}, fields.where).whole(name)


def _hadamard(fields: Fields, value: Any) -> bool:
    if value is not None and type(value) is not bool:
        raise BadConfig(f"{fields.path('index_hadamard')} = {_shown(value)} must be true or false")
    return bool(value)


def _check_indexer(fields: Fields, indexer: Indexer) -> None:
    if indexer.scale_format not in SCALE_FORMATS:
        raise Unsupported(
            f"index scale format {_shown(indexer.scale_format)} is not supported; choose from {', '.join(SCALE_FORMATS)}"
        )
    if indexer.dim > INDEX_SCALE_BLOCK:
        raise Unsupported(
            f"{fields.path('index_head_dim')} = {indexer.dim}: an index record has one scale, which covers at most "
            f"{INDEX_SCALE_BLOCK} values"
        )
    if indexer.rope_dims > indexer.dim:
        raise BadConfig(f"qk_rope_head_dim {indexer.rope_dims} exceeds {fields.path('index_head_dim')} {indexer.dim}")
    if indexer.hadamard and indexer.dim & (indexer.dim - 1):
        raise Unsupported(f"{fields.path('index_head_dim')} = {indexer.dim}: a Hadamard rotation needs a power of two")


def dsa_layers(fields: Fields) -> list[int] | None:
    """The 1-based layer list inside ``dsa_config``, or None when it carries none. Raises BadConfig."""
    if not fields.has("dsa_config"):
        return None
    nested = fields.inner("dsa_config")
    given = [name for name in _DSA_LAYERS if nested.has(name)]
    lists = [nested.listed(name, int) for name in given]
    if any(one != lists[0] for one in lists[1:]):
        raise BadConfig(f"{nested.path(given[0])} and {nested.path(given[1])} disagree; keep one of them")
    return lists[0] if lists else None


def read_quantization(fields: Fields) -> tuple[tuple[int, int], str | None]:
    """``quantization_config`` -> (rows and columns of one fp8 weight block or (0, 0), its ``scale_fmt`` or None).

    Understood: fp8 with ``weight_block_size``, and compressed-tensors that leaves the attention weights alone (Kimi K3).
    Raises Unsupported for anything else.
    """
    if not fields.has("quantization_config"):
        return (0, 0), None
    quant = fields.inner("quantization_config")
    method = quant.text("quant_method", "fp8" if quant.has("weight_block_size") else "unnamed")
    if method == "compressed-tensors":
        ignored = quant.listed("ignore", str, most=1 << 16) if quant.has("ignore") else []
        if any("self_attn" in entry for entry in ignored):
            return (0, 0), None
        raise Unsupported(
            f"{quant.path('ignore')} does not leave self_attn unquantised: packed attention weights are not supported"
        )
    if method != "fp8" or not quant.has("weight_block_size"):
        raise Unsupported(
            f"{quant.path('quant_method')} = {_shown(method)} without understood blocks; supported: fp8 with weight_block_size, "
            "compressed-tensors that ignores self_attn, or no quantization_config"
        )
    block = quant.listed("weight_block_size", int)
    if len(block) != 2 or any(not 1 <= size <= MAX_SIZE for size in block):
        raise BadConfig(
            f"{quant.path('weight_block_size')} = {_shown(block)} must be two positive whole numbers, rows and columns"
        )
    return (block[0], block[1]), quant.text("scale_fmt") if quant.has("scale_fmt") else None

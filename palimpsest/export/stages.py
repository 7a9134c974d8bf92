"""Program -> stages: which exported program serves which op, and the views it is called with.

Every program works on a tile: up to ``ROW_TILE`` query rows, one head, ``KEY_TILE`` keys. Its size does not depend on the
context, so
one compiled tile serves any prepared capacity. A last tile that would leave the buffer starts earlier instead and computes
some rows
again: a row's bits do not depend on its place in a tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palimpsest.core.errors import Unsupported
from palimpsest.core.spec import Buffer, Program, Step
from palimpsest.core.units import align_up, dtype_bytes
from palimpsest.export import programs
from palimpsest.export.native import Native
from palimpsest.export.spec import CONTROL, Argument, Pass, Stage
from palimpsest.kernels.sizes import KEY_TILE, ROW_TILE, avx_select_rows

#: engines that a core has a form of
EXPORTED = ("portable", "avx")
#: query rows whose keys are scored by one call
SELECT_TILE = 4


@dataclass(frozen=True)
class Built:
    """Stages in order, and their programs by name: functions to export, or kernels of a compiled engine.

    arithmetic: id for the manifest
    """

    stages: tuple[Stage, ...]
    functions: dict[str, Callable[..., None]]
    natives: dict[str, Native] = field(default_factory=dict)
    arithmetic: str = programs.ARITHMETIC

    @property
    def names(self) -> tuple[str, ...]:
        """All programs, in the order of their calls."""
        return tuple(dict.fromkeys(one.program for stage in self.stages for one in stage.passes))

    def engine(self, program: str) -> str:
        """What runs ``program``, in the manifest's words."""
        return f"native-{self.natives[program].engine}" if program in self.natives else "aoti"

    def arguments(self, program: str) -> tuple[Argument, ...]:
        """The arguments of the one pass that calls ``program``."""
        return next(one.args for stage in self.stages for one in stage.passes if one.program == program)


class Builder:
    """Builds the stages of one program. Raises Unsupported for an op or a size that cannot be exported."""

    def __init__(self, program: Program):
        self.program, self.limits = program, program.limits
        if program.limits.rows % program.limits.ranks:
            rows, ranks = program.limits.rows, program.limits.ranks
            raise Unsupported(f"{rows} rows on {ranks} ranks: a core needs equal slices; use {-(-rows // ranks) * ranks} rows")
        self.tile = min(ROW_TILE, program.limits.rows)
        self.slice_tile = min(ROW_TILE, program.limits.slice_rows)
        self.functions: dict[str, Callable[..., None]] = {}
        self.natives: dict[str, Native] = {}

    def build(self) -> Built:
        stages = tuple(self._stage(step) for step in self.program.steps)
        names = sorted({one.engine for one in self.natives.values()})
        return Built(stages, self.functions, self.natives, "+".join([programs.ARITHMETIC, *(f"{name}-1" for name in names)]))

    def _stage(self, step: Step) -> Stage:
        makers: dict[str, Callable[[Step, dict[str, Any], dict[str, str]], dict[str, Any]]] = {
            "bind_inputs": self._bind,
            "query_latent": self._query_latent,
            "attention_query": self._attention_query,
            "append_latent": self._append_latent,
            "index_query": self._index_query,
            "append_index": self._append_index,
            "gather_history": self._gather,
            "index_select": self._select,
            "exchange_ids": self._exchange,
            "barrier": self._barrier,
            "sparse_attend": self._attend,
            "project_output": self._project,
            "reduce_output": self._reduce,
        }
        if step.op not in makers:
            raise Unsupported(f"step {step.name}: op {step.op} has no exported form; exported are {', '.join(sorted(makers))}")
        engine = dict(step.params).get("engine", "portable")
        if engine not in EXPORTED:
            raise Unsupported(
                f"step {step.name}: a core has no form of engine {engine}, whose projections and attention round as no exported "
                "program does; plan for avx or portable"
            )
        roles = dict((*step.reads, *step.writes, *step.updates))
        parts = makers[step.op](step, dict(step.params), roles)
        accesses = step.accesses()
        return Stage(
            name=step.name,
            phase=step.phase,
            reads=tuple(b for a, b in accesses if a != "write"),
            writes=tuple(b for a, b in accesses if a != "read"),
            **parts,
        )

    # -- views

    def view(self, buffer: str, take: str, *, mutated: bool = False, tile: int = 0, plane: str | None = None) -> Argument:
        """A view by the letters of ``take``, one per axis of the plane: ``r`` a tile of rows, ``s`` of the slice, ``h`` one head,
        ``k`` a tile of keys, ``.`` whole.
        """
        owner = self.program.by_name[buffer]
        shape = owner.planes[0] if plane is None else next(p for p in owner.planes if p.name == plane)
        itemsize = dtype_bytes(shape.dtype)
        strides = _dense(shape.shape)
        size, stride, steps = [], [], {}
        axes = {"r": "row", "s": "slot", "h": "head", "k": "key"}
        for letter, extent, step in zip(take, shape.shape, strides, strict=True):
            if letter != ".":
                steps[axes[letter]] = step * itemsize
            if letter != "h":
                size.append(extent if letter == "." else tile or min(extent, self.tile))
                stride.append(step)
        offset = owner.plane_offset(shape.name)
        return Argument(buffer, shape.dtype, tuple(size), tuple(stride), offset, steps, mutated)

    def weight(self, name: str, heads: int = 0) -> Argument:
        """A whole weight, or with ``heads`` the rows of one head as [rows per head, ...]."""
        plane = self.program.by_name[name].planes[0]
        shape, itemsize = plane.shape, dtype_bytes(plane.dtype)
        if not heads:
            return Argument(name, plane.dtype, shape, _dense(shape))
        one = shape[1:] if len(shape) == 3 else (shape[0] // heads, *shape[1:])
        size = itemsize
        for extent in one:
            size *= extent
        return Argument(name, plane.dtype, one, _dense(one), 0, {"head": size})

    def rope(self, roles: dict[str, str], tile: int) -> list[Argument]:
        return [self.view("rope", "r..", tile=tile)] if "rope" in roles else []

    def scratch(self, step: Step, planes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Argument]:
        """Typed tensors side by side in the step's planned scratch, 64-aligned."""
        found, at = [], 0
        for dtype, shape in planes:
            argument = Argument(step.scratch_name, dtype, shape, _dense(shape), at, {}, True)
            found.append(argument)
            at = align_up(at + argument.span, 64)
        if at > align_up(step.scratch, 64):
            raise Unsupported(f"step {step.name}: the exported form needs {at} bytes of scratch, {step.scratch} are planned")
        return found

    def add(self, name: str, function: Callable[..., None], args: list[Argument], *loops: str) -> Pass:
        self.functions[name] = function
        return Pass(name, loops, tuple(args))

    # -- ops

    def _bind(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        passes: list[Pass] = []
        if "rope" in roles:
            positions = Argument(f"{CONTROL}positions", "i64", (self.tile,), (1,))
            args = [positions, self.weight("inv_freq"), self.view("rope", "r..", mutated=True)]
            passes.append(self.add("rope_table", programs.rope_table(), args, "row"))
        control = {"positions": self.tile} if passes else {}
        return {
            "runner": "input",
            "passes": tuple(passes),
            "numbers": {"tile": self.tile},
            "control": control,
            "roles": {"hidden": "hidden"},
        }

    def _query_latent(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        args = [
            self.view("hidden", "r."),
            self.weight("w.q_a"),
            self.weight("w.q_a_norm"),
            self.view("q_latent", "r.", mutated=True),
        ]
        return self._rows([self.add(step.name, programs.query_latent(p["eps"]), args, "row")])

    def _attention_query(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        heads = p["heads"]
        args = [
            self.view("q_latent", "r."),
            self.weight("w.q_b", heads),
            self.weight("w.uk", heads),
            *self.rope(roles, self.tile),
        ]
        args.append(self.view("query", "rh.", mutated=True))
        function = programs.attention_query(p["nope"], p["rope_layout"], "rope" in roles)
        return self._rows([self.add(step.name, function, args, "head", "row")], heads=heads)

    def _append_latent(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        width, tile, fmt = p["kv_lora"] + p["rope_dims"], self.tile, p["format"]
        record = self.program.by_name["latent_cache"].planes[0].shape[1] // p["page"]
        if fmt == "fp8_ds_mla":
            blocks = p["kv_lora"] // programs.BLOCK
            planes = [("e4m3", (tile, p["kv_lora"])), ("fp32", (tile, blocks))]
            planes += [("bf16", (tile, p["rope_dims"]))] if p["rope_dims"] else []
        else:
            planes = [({"fp8": "e4m3"}.get(fmt, fmt), (tile, width))]
        outputs, copies, at = self.scratch(step, planes), [], 0
        for argument in outputs:
            size = argument.size[1] * dtype_bytes(argument.dtype)
            copies.append({"tile": argument.offset, "width": size, "page": at, "pitch": record})
            at += size
        args = [self.view("hidden", "r."), self.weight("w.kv_a"), self.weight("w.kv_a_norm"), *self.rope(roles, tile), *outputs]
        function = programs.append_latent(p["kv_lora"], p["eps"], p["rope_layout"], fmt, p["latent_scale"], rope="rope" in roles)
        return self._append(step, self.add(step.name, function, args), "latent_cache", copies)

    def _append_index(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        dim, tile, stored = p["dim"], self.tile, p["format"] == "fp8"
        outputs = self.scratch(step, [("e4m3", (tile, dim)), ("fp32", (tile,))] if stored else [("fp32", (tile, dim))])
        width = dim * dtype_bytes(outputs[0].dtype)
        copies = [{"tile": outputs[0].offset, "width": width, "page": 0, "pitch": width}]
        if stored:
            copies.append({"tile": outputs[1].offset, "width": 4, "page": p["page"] * dim, "pitch": 4})
        args = [
            self.view("hidden", "r."),
            self.weight("w.index_k"),
            self.weight("w.index_k_norm"),
            self.weight("w.index_k_norm_bias"),
        ]
        function = programs.append_index(
            dim,
            p["eps"],
            p["rope_dims"],
            p["rope_layout"],
            rotate=p["hadamard"],
            fmt=p["format"],
            power_of_two=p["scale_format"] == "ue8m0",
            rope="rope" in roles,
        )
        return self._append(
            step, self.add(step.name, function, [*args, *self.rope(roles, tile), *outputs]), "index_cache", copies
        )

    def _append(self, step: Step, one: Pass, cache: str, copies: list[dict[str, int]]) -> dict[str, Any]:
        return {
            "runner": "append",
            "passes": (one,),
            "numbers": {"tile": self.tile},
            "roles": {"cache": cache, "tile": step.scratch_name},
            "planes": tuple(copies),
        }

    def _index_query(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        tile, stored, heads = self.slice_tile, p["format"] == "fp8", p["heads"]
        hidden, source = self.view("hidden", "r.", tile=tile), self.view("q_latent", "r.", tile=tile)
        column = self.view("head_weights", "s.", tile=tile, mutated=True)
        first = self.add(
            f"{step.name}.weights", programs.head_weights(heads, p["dim"]), [hidden, self.weight("w.index_w"), column], "slot"
        )
        args = [source, self.weight("w.index_q", heads), *self.rope(roles, tile)]
        args.append(self.view("index_query", "sh.", tile=tile, mutated=True))
        args += [self.view("head_weights", "sh", tile=tile, mutated=True)] if stored else []
        function = programs.index_query(
            p["dim"],
            p["rope_dims"],
            p["rope_layout"],
            rotate=p["hadamard"],
            fmt=p["format"],
            power_of_two=p["scale_format"] == "ue8m0",
            rope="rope" in roles,
        )
        second = self.add(f"{step.name}.head", function, args, "slot", "head")
        return self._rows([first, second], heads=heads, tile=tile)

    def _gather(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        cache, history = self.program.by_name[roles["cache"]], self.program.by_name[roles["history"]]
        pages, page_bytes = cache.planes[0].shape
        widths = [int(width) for width in p["record"].split("+")]
        source = Argument(
            roles["cache"], "u8", (pages, page_bytes), (page_bytes, 1), 0, {"page": page_bytes}, False, {0: "pages"}
        )
        args = [source]
        offsets: list[int] = []
        for plane, width in zip(history.planes, widths, strict=True):
            size = p["page"] * width
            offset = history.plane_offset(plane.name)
            args.append(
                Argument(history.name, "u8", (pages, size), (p["ranks"] * size, 1), offset, {"place": size}, True, {0: "pages"})
            )
            offsets.append(sum(o * p["page"] for o in widths[: len(offsets)]))
        one = self.add(step.name, programs.gather_pages(tuple(offsets)), args)
        return {"runner": "gather", "passes": (one,), "roles": {"cache": cache.name, "staging": roles["staging"]}}

    def _select(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        stored, topk, tokens = p["format"] == "fp8", p["topk"], self.limits.tokens
        if stored and p["engine"] == "avx":
            return self._select_native(step, p, avx_select_rows(topk, p["heads"], p["dim"]))
        tile, keys = min(SELECT_TILE if stored else 1, self.limits.slice_rows), min(KEY_TILE, tokens)
        if not stored and tokens % keys:
            raise Unsupported(
                f"fp32 index records need a context of whole {KEY_TILE}-token tiles, not {tokens}; "
                f"use {align_up(tokens, KEY_TILE)}"
            )
        state = self.scratch(step, [("i64", (tile, topk))])[0]
        seen, start = (Argument(f"{CONTROL}{n}", "i64", (size,), (1,)) for n, size in (("seen", tile), ("start", 2)))
        scored = [self.view("index_query", "s..", tile=tile), self.view("head_weights", "s.", tile=tile)]
        scored.append(self.view("index_history", "k.", tile=keys, plane="keys"))
        scored += [self.view("index_history", "k", tile=keys, plane="scales")] if stored else []
        nans = self.view("local_counts", "s", tile=tile, plane="nans", mutated=True)
        first = self.add(f"{step.name}.tile", programs.select_tile(stored), [*scored, seen, start, state, nans], "slot", "key")
        held = Argument(state.buffer, state.dtype, state.size, state.stride, state.offset)
        args = [held, seen, self.view("local_ids", "s.", tile=tile, mutated=True)]
        args.append(self.view("local_counts", "s", tile=tile, plane="counts", mutated=True))
        second = self.add(f"{step.name}.emit", programs.select_emit(topk), args, "slot")
        return {
            "runner": "select",
            "passes": (first, second),
            "numbers": {"tile": tile, "keys": keys},
            "control": {"seen": tile, "start": 2},
        }

    def _select_native(self, step: Step, p: dict[str, Any], most: int) -> dict[str, Any]:
        """The compiled engine's own kernels over groups of ``most`` rows; its scratch is one argument, laid out by its code."""
        tile, keys = min(most, self.limits.slice_rows), min(KEY_TILE, self.limits.tokens)
        scratch = Argument(step.scratch_name, "u8", (step.scratch,), (1,), 0, {}, True)
        seen, start = (Argument(f"{CONTROL}{n}", "i64", (size,), (1,)) for n, size in (("seen", tile), ("start", 2)))
        numbers = {n: p[n] for n in ("topk", "heads", "dim")} | {"rows": tile, "keys": keys, "scratch": step.scratch}
        args = [self.view("index_query", "s..", tile=tile), self.view("head_weights", "s.", tile=tile)]
        args += [self.view("index_history", take, tile=keys, plane=plane) for take, plane in (("k.", "keys"), ("k", "scales"))]
        args += [seen, start, self.view("local_counts", "s", tile=tile, plane="nans", mutated=True), scratch]
        found = [self.view("local_ids", "s.", tile=tile, mutated=True)]
        found.append(self.view("local_counts", "s", tile=tile, plane="counts", mutated=True))
        names = {f"{step.name}.tile": "index_select.tile", f"{step.name}.emit": "index_select.emit"}
        self.natives |= {name: Native(p["engine"], kernel, numbers) for name, kernel in names.items()}
        second = Pass(f"{step.name}.emit", ("slot",), (scratch, *found))
        return {
            "runner": "select",
            "passes": (Pass(f"{step.name}.tile", ("slot", "key"), tuple(args)), second),
            "numbers": {"tile": tile, "keys": keys},
            "control": {"seen": tile, "start": 2},
        }

    def _exchange(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        return {"runner": "exchange_ids", "roles": {r: roles[r] for r in ("local_ids", "local_counts", "ids", "counts")}}

    def _barrier(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        return {"runner": "barrier", "roles": {"signals": roles["signals"]}}

    def _attend(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        history = self.program.by_name["latent_history"]
        args = [self.view("ids", "r.", tile=1), self.view("counts", "r", tile=1)]
        args = [_first_row(args[0]), args[1], *_record_planes(history, p)]
        args += [_first_row(self.view("query", "r..", tile=1)), _first_row(self.view("context", "r..", tile=1, mutated=True))]
        function = programs.attend(p["format"], p["kv_lora"], p["latent_scale"], p["softmax_scale"])
        return self._rows([self.add(step.name, function, args, "row")], tile=1)

    def _project(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        heads, gated = p["heads"], bool(p["gate"])
        plane = self.program.by_name["w.o"].planes[0]
        size = dtype_bytes(plane.dtype)
        o = Argument("w.o", plane.dtype, (p["hidden"], p["v_dim"]), (heads * p["v_dim"], 1), 0, {"head": p["v_dim"] * size})
        gate = [self.view("hidden", "r."), self.weight("w.gate", heads)] if gated else []
        args = [self.view("context", "rh."), self.weight("w.uv", heads), *gate, o, self.view("partial", "r.", mutated=True)]
        found = self._rows([self.add(step.name, programs.project_head(gated), args, "row", "head")], heads=heads)
        return found | {"roles": {"clear": "partial"}}

    def _reduce(self, step: Step, p: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
        return {"runner": "reduce_output", "roles": {r: roles[r] for r in ("partial", "staging", "output")}}

    def _rows(self, passes: list[Pass], *, heads: int = 0, tile: int = 0) -> dict[str, Any]:
        return {
            "runner": "rows",
            "passes": tuple(passes),
            "numbers": {"tile": tile or self.tile} | ({"heads": heads} if heads else {}),
        }


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, at = [], 1
    for extent in reversed(shape):
        strides.append(at)
        at *= extent
    return tuple(reversed(strides))


def _first_row(argument: Argument) -> Argument:
    """One row without its axis of one."""
    return Argument(
        argument.buffer, argument.dtype, argument.size[1:], argument.stride[1:], argument.offset, argument.steps, argument.mutated
    )


def _record_planes(history: Buffer, p: dict[str, Any]) -> list[Argument]:
    """Latent records as typed views: one plane, or codes, scales and keys of fp8_ds_mla."""
    tokens, record = history.planes[0].shape
    latent, rope, fmt = p["kv_lora"], p["rope_dims"], p["format"]
    if fmt == "fp8_ds_mla":
        blocks = latent // programs.BLOCK
        parts = [("e4m3", latent, 0), ("fp32", blocks, latent), *([("bf16", rope, latent + 4 * blocks)] if rope else [])]
    else:
        parts = [({"fp8": "e4m3"}.get(fmt, fmt), latent + rope, 0)]
    return [
        Argument(history.name, dtype, (tokens, width), (record // dtype_bytes(dtype), 1), offset, {}, False, {0: "tokens"})
        for dtype, width, offset in parts
    ]


def build(program: Program) -> Built:
    """The stages of ``program``. Raises Unsupported."""
    return Builder(program).build()

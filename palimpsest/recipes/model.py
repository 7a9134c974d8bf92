"""A whole model as one Program: every layer of one prefill chunk on one tensor-parallel rank, from token ids to last-row logits.

Names, which whoever folds identical layers may rely on:

* what belongs to one layer is ``layerNNN.<role>`` (three digits, 0-based): buffers, steps, weights (``layer003.w.q_a``) and the
  scratch of steps. Two buffers with the same role and the same planes play the same part in their layers, and every life of a
  reusable one begins with a write inside its own layer, so one address per role is always possible.
* what crosses layers has no layer in its name: ``residual`` (or ``residual.NN``, the states of an attention-residual stream, kept
  until the last layer), ``ids`` and ``counts`` (a layer that shares its indexer reads what the last full layer wrote),
  ``rope``, ``inv_freq``, ``staging``, ``signals``.
* a drafter's buffers and steps are ``drafter.<role>``; the fact ``deferred`` holds this prefix. They are planned with the target,
  so that turning drafting on cannot fail later, and a run that does not draft need not map them.

Ops outside the sparse attention are planned only (``ops``): running such a program is refused by the table of kernels. Layers for
next-token prediction that a checkpoint may carry are not part of it.
"""

import dataclasses

from palimpsest.core.geometry import Formats, Geometry, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Buffer, Limits, Program, Step
from palimpsest.recipes import ops
from palimpsest.recipes.blocks import layer_program
from palimpsest.recipes.draft_ops import TAP_HIDDEN
from palimpsest.recipes.drafter import Drafter, declare_drafter, drafter_named
from palimpsest.recipes.kda import linear_attention
from palimpsest.recipes.moe import mlp, pairs_of
from palimpsest.recipes.sheet import EXPERT_PAIRS, Sheet
from palimpsest.recipes.tensors import layer_weights, model_parameters, outer_weights

#: buffers of a layer program that all layers have in common
SHARED = ("inv_freq", "signals", "staging", "rope", "ids", "counts")


def model_program(
    geometry: Geometry,
    limits: Limits,
    formats: Formats,
    *,
    weights: str = "checkpoint",
    drafter: Drafter | str | None = None,
    engine: str = "portable",
    threads: int = 1,
    expert_pairs: int = EXPERT_PAIRS,
) -> Program:
    """Every layer of one prefill chunk as one Program.

    weights: how they lie in memory: ``bf16`` (``formats.weights``), ``fp8`` (blocks with fp32 scales), ``mxfp4`` (routed experts
             packed, the rest as bf16), or ``checkpoint``: as the model is published
    drafter: a drafter, or ``dflash`` / ``dflash2`` for the usual shape of one
    engine, threads: what the sparse-attention steps will run on: their scratch depends on both
    expert_pairs: most (row, slot) pairs of one pass over the experts: fewer need less workspace and more passes
    Raises Unsupported for a configuration that lacks a whole model's fields, and for ranks that do not divide its heads.
    """
    sheet = Sheet(geometry, limits, formats, weights, expert_pairs)
    draft = drafter_named(geometry, drafter) if isinstance(drafter, str) else drafter
    model = _Model(sheet, draft, {"engine": engine, "threads": threads})
    model.begin()
    for layer in range(geometry.layers):
        model.layer(layer)
    outputs = model.end()
    inside = {name for step in sheet.steps for _, name in step.accesses()}
    missing = [b.name for b in sheet.buffers if b.name not in inside]
    assert not missing, f"declared and never used: {missing[:5]}"
    return Program(
        name=f"{geometry.name}/model",
        limits=limits,
        buffers=tuple(sheet.buffers),
        steps=tuple(sheet.steps),
        histories=model.histories(),
        inputs=("tokens",),
        outputs=outputs,
        facts=_facts(sheet, weights, draft),
    )


def deferred_buffers(program: Program) -> tuple[str, ...]:
    """Names of the buffers that only a drafting run maps; empty for a program without a drafter."""
    prefix = dict(program.facts).get("deferred", "")
    return tuple(b.name for b in program.all_buffers if prefix and b.name.startswith(str(prefix)))


def _facts(sheet: Sheet, asked: str, draft: Drafter | None) -> tuple[tuple[str, int | str | float | bool], ...]:
    g, formats = sheet.geometry, sheet.formats
    pairs, passes = pairs_of(sheet.limits.rows, sheet.body.experts_per_token, sheet.expert_pairs)
    facts: list[tuple[str, int | str | float | bool]] = [
        ("family", g.family),
        ("scope", "model"),
        ("kind", "whole model"),
        ("layers", g.layers),
        ("index_layers", len(g.full_layers)),
        ("latent_layers", len(g.sparse_layers)),
        ("linear_layers", g.schedule.count("linear")),
        ("topk", g.indexer.topk),
        ("index_format", formats.index),
        ("index_record_bytes", index_record_bytes(g, formats)),
        ("latent_format", formats.latent),
        ("latent_record_bytes", latent_record_bytes(g, formats)),
        ("activation", formats.activation),
        ("weights", formats.weights if sheet.storage == "bf16" else sheet.storage),
        ("weights_asked", asked),
        ("parameters", model_parameters(g)),
        ("expert_pairs", pairs),
        ("expert_passes", passes),
    ]
    return (*facts, *((("drafter", draft.name), ("deferred", "drafter.")) if draft else ()))


class _Model:
    """Writes the layers onto a sheet and keeps what crosses them: the residual stream and the drafter's taps."""

    def __init__(self, sheet: Sheet, draft: Drafter | None, how: dict[str, str | int]):
        self.sheet, self.draft, self.how = sheet, draft, how
        self.block = sheet.body.residual_block
        self.layers: dict[str, tuple[tuple[Buffer, ...], tuple[Step, ...]]] = {}
        self.states: list[str] = []

    def begin(self) -> None:
        """What all layers share, and the embedding of this chunk."""
        sheet, g = self.sheet, self.sheet.geometry
        shared: dict[str, Buffer] = {}
        for kind in dict.fromkeys(k for k in g.schedule if k != "linear"):
            template = layer_program(g, sheet.limits, sheet.formats, g.schedule.index(kind), **self.how)  # type: ignore[arg-type]
            own = tuple(b for b in template.buffers if b.name not in SHARED and b.kind != "weights" and b.name != "hidden")
            self.layers[kind] = (own, tuple(s for s in template.steps if s.op != "bind_inputs"))
            shared |= {b.name: b for b in template.buffers if b.name in SHARED}
        sheet.buffers += shared.values()
        sheet.weights(outer_weights(g))
        rows = sheet.limits.rows
        tokens = sheet.buffer("tokens", "i32", {"rows": rows}, "rows x 4")
        roles = {"tokens": tokens, "embedding": sheet.w("embedding"), "staging": "staging", "output": self._state()}
        sheet.step(ops.EMBED_ROWS, "embed_rows", "p0", roles, hidden=g.hidden, ranks=sheet.limits.ranks)
        if "rope" in shared:
            sheet.step(ops.ROPE_TABLE, "rope_table", "p0", {"inv_freq": "inv_freq", "rope": "rope"}, rope_dims=g.rope.dims)

    def layer(self, layer: int) -> None:
        sheet, g = self.sheet, self.sheet.geometry
        sheet.at = f"layer{layer:03d}."
        sheet.weights(layer_weights(g, layer))
        hidden = sheet.rows("hidden", g.hidden)
        self._norm("input_norm", "attention", self.states, hidden)
        # a block of the attention residual ends before this layer: its state stays, and a new one begins with this output
        fresh = bool(self.block) and layer % self.block == 0
        into = self._state() if fresh else ""
        if g.schedule[layer] == "linear":
            output = linear_attention(sheet, hidden, into)
        else:
            output = self._sparse(g.schedule[layer], into)
        if not fresh:
            self._add("add_attention", output)
        mlp_in = sheet.rows("mlp_input", g.hidden)
        self._norm("post_norm", "mlp", self.states, mlp_in)
        self._add("add_mlp", mlp(sheet, layer, mlp_in))
        sheet.at = ""
        self._tap(layer)

    def end(self) -> tuple[str, ...]:
        """The last row's logits, then what a drafter does after the chunk; returns the program's outputs."""
        sheet, g, vocab = self.sheet, self.sheet.geometry, self.sheet.body.vocab
        last = sheet.buffer("last_hidden", sheet.act, {"fixed:row": 1, "fixed": g.hidden}, f"1 x {g.hidden}")
        self._norm("final_norm", "output", self.states, last, rows=1)
        part = -(-vocab // sheet.limits.ranks)
        local = sheet.buffer("logits_part", "fp32", {"fixed:row": 1, "fixed": part}, f"{vocab}/ranks x 4")
        logits = sheet.buffer("logits", "fp32", {"fixed:row": 1, "fixed": vocab}, f"{vocab} x 4")
        head = sheet.w("embedding" if sheet.body.tied_embeddings else "head")
        sheet.step(
            ops.LAST_LOGITS, "last_logits", "p9", {"input": last, "head": head, "part": local}, hidden=g.hidden, vocab=part
        )
        roles = {"part": local, "staging": "staging", "logits": logits}
        sheet.step(ops.GATHER_LOGITS, "gather_logits", "p9", roles, vocab=vocab, ranks=sheet.limits.ranks)
        return (logits, *(declare_drafter(sheet, self.draft, head) if self.draft else ()))

    def histories(self) -> tuple[str, ...]:
        """(early, late) of every full layer, one after the other."""
        at = [f"layer{layer:03d}." for layer in self.sheet.geometry.full_layers]
        return tuple(f"{one}{name}" for one in at for name in ("index_history", "latent_history"))

    def _state(self) -> str:
        """Declare the next state of the residual stream."""
        at, self.sheet.at = self.sheet.at, ""
        name = f"residual.{len(self.states):02d}" if self.block else "residual"
        self.states.append(self.sheet.rows(name, self.sheet.geometry.hidden))
        self.sheet.at = at
        return self.states[-1]

    def _blocks(self) -> dict[str, str]:
        return {f"block{i:02d}": name for i, name in enumerate(self.states[:-1])}

    def _norm(self, name: str, mix: str, states: list[str], output: str, rows: int = 0) -> None:
        """RMS norm of the residual stream, mixed over its block states first when it has any."""
        sheet, hidden = self.sheet, self.sheet.geometry.hidden
        roles = {"weight": sheet.w(name), "output": output}
        if not self.block:
            sheet.step(ops.RMS_NORM, name, "norm", roles | {"input": states[-1]}, hidden=hidden, rows=rows)
            return
        roles |= {"state": states[-1], "mix_norm": sheet.w(f"{mix}_mix_norm"), "mix_proj": sheet.w(f"{mix}_mix_proj")}
        sheet.step(ops.MIX_NORM, name, "norm", roles | self._blocks(), hidden=hidden, blocks=len(states) - 1, rows=rows)

    def _add(self, name: str, output: str) -> None:
        roles = {"state": self.states[-1], "output": output}
        self.sheet.step(ops.ADD_RESIDUAL, name, "residual", roles, hidden=self.sheet.geometry.hidden)

    def _sparse(self, kind: str, into: str) -> str:
        """The attention sublayer's steps from ``blocks``, renamed into this layer."""
        sheet, at = self.sheet, self.sheet.at
        buffers, steps = self.layers[kind]
        name = {b.name: at + b.name for b in buffers} | ({"output": into} if into else {})
        for buffer in buffers:
            if not (into and buffer.name == "output"):
                sheet.buffers.append(dataclasses.replace(buffer, name=name[buffer.name]))

        def moved(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple((role, b if b in SHARED else name.get(b, at + b)) for role, b in pairs)

        for s in steps:
            sheet.steps.append(
                dataclasses.replace(s, name=at + s.name, reads=moved(s.reads), writes=moved(s.writes), updates=moved(s.updates))
            )
        return name["output"]

    def _tap(self, layer: int) -> None:
        if self.draft is None or layer not in self.draft.taps:
            return
        sheet, hidden = self.sheet, self.sheet.geometry.hidden
        number = self.draft.taps.index(layer)
        tap = sheet.rows(f"drafter.tap{number:02d}", hidden)
        roles = {"state": self.states[-1], "tap": tap} | self._blocks()
        sheet.step(TAP_HIDDEN, f"drafter.tap{number:02d}", "draft", roles, hidden=hidden, blocks=len(self.states) - 1)

"""The same attention sublayer in ``transformers`` (DeepSeek-V3.2, eager, dense mask) and here, over caches that are already
full."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.problems import Alone
from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits
from palimpsest.kernels.call import Chunk, Scratch
from palimpsest.kernels.table import implementation
from palimpsest.recipes.blocks import layer_program

HIDDEN, Q_LORA = 256, 128


class _FullCache:
    """A cache whose history is there: new rows overwrite its end, nothing is copied or grown."""

    def __init__(self, tokens: int):
        g = torch.Generator().manual_seed(1)
        self.latent = torch.randn(1, 1, tokens, 512, generator=g).bfloat16()
        self.rope = torch.randn(1, 1, tokens, 64, generator=g).bfloat16()
        self.index = torch.randn(1, tokens, 128, generator=g).bfloat16()

    def update(self, latent: torch.Tensor, rope: torch.Tensor, layer: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.latent[:, :, -latent.shape[2] :] = latent
        self.rope[:, :, -rope.shape[2] :] = rope
        return self.latent, self.rope

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.index[:, -keys.shape[1] :] = keys
        return self.index


@dataclass(frozen=True)
class Shape:
    rows: int
    tokens: int
    index_heads: int
    heads: int


#: what is neither indexer nor attention in their sublayer, and what is one of them in ours
PROJECTIONS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")
HOT = ("index_query", "index_select", "sparse_attend")


class Theirs:
    """One layer. ``aside``: least CPU seconds of each projection around indexer and attention."""

    def __init__(self, shape: Shape):
        from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

        config = DeepseekV32Config(
            hidden_size=HIDDEN, num_attention_heads=shape.heads, num_key_value_heads=shape.heads, q_lora_rank=Q_LORA,
            kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_n_heads=shape.index_heads, index_head_dim=128,
            index_topk=2048,
            num_hidden_layers=1, vocab_size=32,
        )  # fmt: skip
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        self.layer, self.cache = DeepseekV32Attention(config, 0).bfloat16().eval(), _FullCache(shape.tokens)
        self.hidden = torch.randn(1, shape.rows, HIDDEN).bfloat16()
        position = torch.zeros(1, shape.rows, 64).bfloat16()
        self.angles = (torch.ones_like(position), position)
        seen = torch.arange(shape.tokens - shape.rows, shape.tokens)[:, None]
        future = torch.arange(shape.tokens)[None] > seen
        self.mask = torch.zeros(1, 1, *future.shape, dtype=torch.bfloat16).masked_fill_(future, torch.finfo(torch.bfloat16).min)
        self.aside: dict[str, float] = {}
        for name in PROJECTIONS:
            self._time(name, getattr(self.layer, name))

    def _time(self, name: str, module: torch.nn.Module) -> None:
        started = [0.0]

        def begin(*_: object) -> None:
            started[0] = time.thread_time()

        def end(*_: object) -> None:
            self.aside[name] = min(time.thread_time() - started[0], self.aside.get(name, float("inf")))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def __call__(self) -> None:
        with torch.inference_mode():
            self.layer(self.hidden, self.angles, self.mask, cache=self.cache)


class Ours:
    """The program's steps on one rank, in plain buffers; the gathers are local."""

    def __init__(self, shape: Shape, engine: str):
        geometry = Geometry(
            family="bench", name="bench", hidden=HIDDEN, layers=1, heads=shape.heads, q_lora=Q_LORA, kv_lora=512, nope=128,
            rope=Rope("none", 64), v_dim=128, softmax_scale=192**-0.5, latent_norm_eps=1e-6, output_gate=False,
            indexer=Indexer(shape.index_heads, 128, 2048, "none", 0, 1e-6), schedule=("full",), max_context=shape.tokens,
        )  # fmt: skip
        program = layer_program(geometry, Limits(shape.tokens, shape.rows, 1), Formats(), 0, engine=engine)
        from palimpsest.kernels.call import TORCH_DTYPES, Call

        g, planes, self.raw = torch.Generator().manual_seed(2), {}, {}
        for buffer in program.all_buffers:
            raw = torch.zeros(buffer.nbytes + 64, dtype=torch.uint8)
            raw = self.raw[buffer.name] = raw[-raw.data_ptr() % 64 :][: buffer.nbytes]
            planes[buffer.name] = {}
            for plane in buffer.planes:
                at = buffer.plane_offset(plane.name)
                view = planes[buffer.name][plane.name] = (
                    raw[at : at + plane.nbytes].view(TORCH_DTYPES[plane.dtype]).view(plane.shape)
                )
                if buffer.kind == "weights":
                    view.copy_(torch.randn(plane.shape, generator=g) / plane.shape[-1] ** 0.5)
        self._fill(planes["index_cache"]["index_cache"], planes["latent_cache"]["latent_cache"], g)
        self.chunk = Chunk(shape.tokens - shape.rows, shape.rows, torch.randn(shape.rows, HIDDEN, generator=g))
        self.steps = []
        for step in program.steps:
            roles = {role: planes[name] for role, name in (*step.reads, *step.writes, *step.updates)}
            scratch = Scratch(self.raw[step.scratch_name] if step.scratch else torch.empty(0, dtype=torch.uint8))
            call = Call(step.name, dict(step.params), roles, {}, scratch, _Still())
            self.steps.append((implementation(step.op, engine), call))
        self.split: dict[str, float] = {}

    @staticmethod
    def _fill(index: torch.Tensor, latent: torch.Tensor, g: torch.Generator) -> None:
        for pages in range(0, len(index), 64):
            part = index[pages : pages + 64]
            part[:, : 64 * 128].copy_(
                (torch.randn(len(part), 64 * 128, generator=g) * 2).to(torch.float8_e4m3fn).view(torch.uint8)
            )
            part[:, 64 * 128 :].view(torch.float32).fill_(1.0)
            part = latent[pages : pages + 64]
            part.copy_(torch.randn(part.shape, generator=g).to(torch.float8_e4m3fn).view(torch.uint8))

    def __call__(self) -> None:
        for run, call in self.steps:
            start = time.thread_time()
            run(call, self.chunk)
            self.split[call.name] = min(time.thread_time() - start, self.split.get(call.name, float("inf")))


class _Still(Alone):
    def barrier(self, label: str) -> None:
        """One rank waits for nobody."""

    def exchange(self, sends: object, receives: object, label: str) -> None:
        """One rank has no peer."""

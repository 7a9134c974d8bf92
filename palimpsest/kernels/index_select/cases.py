"""Hostile cases of index_select: ties of every kind, NaN and infinite scores, contexts around top-k, slices of several ranks.

The micro model of the field cases: 2 heads, dim 8, top-k 8. Rows of the ``plateau`` data have many exact zeros, so their cutoff
is a tie."""

from collections.abc import Callable, Iterator

import torch

from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case, Draw, Planes, one, poison

HEADS, DIM, TOPK, TOKENS = 2, 8, 8, 96

#: (draw, keys [TOKENS,DIM], scales [TOKENS], queries [slice,HEADS,DIM], weights [slice,HEADS]) -> edits them in place
Edit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _plain(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    """Natural data: with two heads about a quarter of the scores are exactly zero."""


def _constant(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    keys[:], scales[:] = keys[0].clone(), 1.0


def _plateau(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    keys[:] = -keys.abs()
    queries[:] = queries.abs()
    keys[5::17] = 1.0


def _few_values(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    keys[:], scales[:] = keys[:3].repeat(len(keys) // 3, 1), 0.5


def _signed_zeros(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    """Every score is +0 or -0: zero queries under weights of both signs."""
    queries[:] = 0.0
    weights[:, 0], weights[:, 1] = -1.0, 1.0
    scales[::2] = -scales[::2]


def _nan_key(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    keys[3], keys[9, 0], scales[11] = torch.nan, torch.nan, torch.nan


def _all_nan(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    weights[:] = torch.nan


def _infinite(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    scales[2::5], scales[3::7] = torch.inf, -torch.inf


def _negative(keys: torch.Tensor, scales: torch.Tensor, queries: torch.Tensor, weights: torch.Tensor) -> None:
    weights[:] = -weights.abs()


EDITS = {
    "plain": _plain, "constant": _constant, "plateau": _plateau, "few values": _few_values, "signed zeros": _signed_zeros,
    "NaN keys": _nan_key, "all NaN": _all_nan, "infinite": _infinite, "negative": _negative,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for kind in ("fp8", "fp32"):
        for name, edit in EDITS.items():
            yield _case(f"{name}, {kind}", edit, kind, 1, 0, 16)
            yield _case(f"{name}, {kind}, ragged on 4 ranks", edit, kind, 4, 48, 13)
        for visible in (0, 1, 7, 8, 9, 10, 12, 63, 64):
            yield _case(f"{visible} visible, {kind}", _plain, kind, 2, max(0, visible - 1), min(1, visible))
        for start in (0, 16, 48):
            yield _case(f"16 rows at {start}, {kind}", _plateau, kind, 2, start, 16)


def _case(name: str, edit: Edit, kind: str, ranks: int, history: int, rows: int) -> Case:
    size = -(-16 // ranks)
    params = {"topk": TOPK, "heads": HEADS, "dim": DIM, "format": kind, "ranks": ranks}
    return Case(
        name, params, Chunk(history, rows), tuple(_planes(edit, kind, size, rank, history + rows) for rank in range(ranks))
    )


def _planes(edit: Edit, kind: str, size: int, rank: int, visible: int) -> Planes:
    draw = Draw(1)
    keys, scales = draw.integers((TOKENS, DIM)) / 2, torch.exp2(draw.integers((TOKENS,)))
    draw = Draw(2 + rank)
    queries, weights = draw.integers((size, HEADS, DIM)) / 2, draw.normal((size, HEADS))
    if kind == "fp32":
        weights = draw.integers((size, HEADS)) / 4
    edit(keys, scales, queries, weights)
    if kind == "fp32":
        keys *= scales[:, None]
    keys[visible:], scales[visible:] = torch.nan, torch.nan
    history = {"keys": keys, "scales": scales} if kind == "fp8" else {"keys": keys}
    stored = torch.float8_e4m3fn if kind == "fp8" else torch.float32
    history["keys"], queries = keys.to(stored), queries.to(stored)
    planes = one(index_query=queries, head_weights=weights, local_ids=poison((size, TOPK), "i32"))
    counts = {"counts": poison((size,), "i32"), "nans": poison((size,), "i32")}
    return planes | {"index_history": history, "local_counts": counts}

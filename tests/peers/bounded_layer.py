"""The attention sublayer in fp64 with a derived bound for an fp32 evaluation, along both roads that implementations take.

``expanded``: keys and values of every token are formed first (transformers). ``absorbed``: the key up-projection is folded into
the query and the value up-projection applied after the weighted sum (ours). Same exact value, different roundings.
"""

from collections.abc import Mapping

import numpy as np
from running_error import Bounded, attend, exact, layer_norm, linear, matmul, rms_norm, rope, rounded, scaled, transpose

from palimpsest.core.geometry import Geometry


def angles(positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """fp32(position) * fp32(inv_freq), rounded to fp32: [tokens, dims/2]."""
    return (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]).astype(np.float32).astype(np.float64)


class BoundedLayer:
    """Everything before the choice of a road. ``hidden``: fp32 [tokens, hidden] of the whole context; weights by short name."""

    def __init__(self, g: Geometry, weights: Mapping[str, np.ndarray], hidden: np.ndarray, inv_freq: np.ndarray):
        self.g, self.w = g, weights
        x = exact(hidden)
        self.angle = angles(np.arange(len(hidden)), inv_freq)
        self.q_latent = rms_norm(linear(x, weights["q_a"]), weights["q_a_norm"], g.latent_norm_eps)
        q = linear(self.q_latent, weights["q_b"]).reshape(len(hidden), g.heads, g.nope + g.rope.dims)
        self.q_nope = q[..., : g.nope]
        self.q_rope = rope(q[..., g.nope :], self.angle[:, None, :], "interleaved")
        kv = linear(x, weights["kv_a"])
        self.latent = rms_norm(kv[:, : g.kv_lora], weights["kv_a_norm"], g.latent_norm_eps)
        self.k_rope = rope(kv[:, g.kv_lora :], self.angle, "interleaved")
        up = weights["kv_b"].reshape(g.heads, g.nope + g.v_dim, g.kv_lora)
        self.uk, self.uv = up[:, : g.nope], up[:, g.nope :]
        self.hidden = x

    def index_scores(self) -> Bounded:
        """Unquantised index scores [tokens, tokens], before causality."""
        w, ix = self.w, self.g.indexer
        tokens = len(self.angle)
        q = linear(self.q_latent, w["index_q"]).reshape(tokens, ix.heads, ix.dim)
        k = layer_norm(linear(self.hidden, w["index_k"]), w["index_k_norm"], w["index_k_norm_bias"], ix.norm_eps)
        q, k = self._rotate_first(q, self.angle[:, None, :]), self._rotate_first(k, self.angle)
        head = scaled(linear(self.hidden, w["index_w"]), ix.heads**-0.5 * ix.dim**-0.5)
        dots = matmul(Bounded(np.swapaxes(q.value, 0, 1), np.swapaxes(q.bound, 0, 1)), transpose(k))  # [heads, tokens, tokens]
        kept = Bounded(np.maximum(dots.value, 0), dots.bound)  # ReLU is 1-Lipschitz
        weights = Bounded(head.value.T[:, :, None], head.bound.T[:, :, None])
        product = rounded(kept.value * weights.value, kept.bound * weights.largest + np.abs(kept.value) * weights.bound, 3)
        return Bounded(product.value.sum(0), product.bound.sum(0) + ((1 + 2.0**-24) ** ix.heads - 1) * product.largest.sum(0))

    def _rotate_first(self, x: Bounded, angle: np.ndarray) -> Bounded:
        n = self.g.indexer.rope_dims
        turned = rope(x[..., :n], angle, self.g.indexer.rope_layout)
        return Bounded(np.concatenate([turned.value, x.value[..., n:]], -1), np.concatenate([turned.bound, x.bound[..., n:]], -1))

    def output(self, mask: np.ndarray, road: str) -> Bounded:
        """Attention over ``mask`` [tokens, tokens] (bool), gate-free, then o_proj: [tokens, hidden]."""
        heads = [self._head(h, mask, road) for h in range(self.g.heads)]
        joined = Bounded(np.concatenate([h.value for h in heads], -1), np.concatenate([h.bound for h in heads], -1))
        return linear(joined, self.w["o"])

    def _head(self, h: int, mask: np.ndarray, road: str) -> Bounded:
        q_nope, q_rope = self.q_nope[:, h], self.q_rope[:, h]
        if road == "expanded":
            nope = matmul(q_nope, transpose(linear(self.latent, self.uk[h])))
        else:
            nope = matmul(matmul(q_nope, exact(self.uk[h])), transpose(self.latent))
        tail = matmul(q_rope, transpose(self.k_rope))
        # nope and rope parts are one dot product in both roads: the extra roundings of adding them are one per part
        logits = scaled(rounded(nope.value + tail.value, nope.bound + tail.bound, self.g.latent_dim), self.g.softmax_scale)
        if road == "expanded":
            return attend(logits, linear(self.latent, self.uv[h]), mask)
        return linear(attend(logits, self.latent, mask), self.uv[h])

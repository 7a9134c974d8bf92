"""A small geometry with the real record sizes, for tests that need one."""

import dataclasses

import numpy as np
import pytest

from palimpsest.core.geometry import Geometry, Indexer, Rope


@pytest.fixture(scope="session")
def make_geometry():
    """Makes a Geometry; indexer numbers by keyword (heads, dim, topk, scale_format), the rest by ``replace``."""

    def make(*, heads=4, dim=128, topk=128, scale_format="ue8m0", **changes):
        indexer = Indexer(heads, dim, topk, "none", 0, 1e-5, scale_format=scale_format)
        base = Geometry(
            family="test",
            name="tiny",
            hidden=64,
            layers=1,
            heads=16,
            q_lora=32,
            kv_lora=512,
            nope=16,
            rope=Rope("none", 64),
            v_dim=16,
            softmax_scale=0.07,
            latent_norm_eps=1e-6,
            output_gate=False,
            indexer=indexer,
            schedule=("full",),
            max_context=1 << 20,
        )
        return dataclasses.replace(base, **changes)

    return make


@pytest.fixture(scope="session")
def portable_context():
    """A straightforward simulation of the portable-1 attention of one row, by its written order.

    (query [heads, dim] fp64, keys [n, dim] fp64, scale, kv_lora, block) -> context [heads, kv_lora] fp32
    """

    def simulate(query, keys, scale, kv_lora, block=64):
        stored = keys.astype(np.float32)
        values = np.ascontiguousarray(stored[:, :kv_lora])
        logits = (scale * (query @ stored.astype(np.float64).T)).astype(np.float32)
        shifted = logits - logits.max(axis=1, keepdims=True)
        p = np.exp(shifted.astype(np.float64)).astype(np.float32)
        total = np.zeros((len(query), 1), np.float32)
        acc = np.zeros((len(query), kv_lora), np.float32)
        for start in range(0, len(keys), block):
            part = p[:, start : start + block]
            acc += part @ values[start : start + block]
            total += part.sum(axis=1, keepdims=True, dtype=np.float32)
        return acc / total

    return simulate

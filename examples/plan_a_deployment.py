"""Plan a deployment: what does a one-million-token prefill of Kimi K3.1-Pro take, why, and what would other engines take?

Cells are marked with ``# %%``: run them one by one in an editor, or all with ``python examples/plan_a_deployment.py``.
Needs no GPU, no weights and no torch. An optional argument names a folder for the picture.
"""

# %% The model is a preset, a config.json, or a checkpoint folder.
import sys
from pathlib import Path

from palimpsest import Deployment, Limits, compare, fit, load_geometry, plan

MIB, GIB = 1 << 20, 1 << 30
geometry = load_geometry("kimi-k3.1-pro")
print(f"{geometry.name}: {geometry.layers} layers, {len(geometry.full_layers)} of them sparse, top-k {geometry.indexer.topk}")

# %% Plan one layer's prefill on 16 ranks. Both arrangements are planned and checked; nothing is allocated.
limits = Limits(tokens=1 << 20, rows=4096, ranks=16)
planned = plan(geometry, limits)
early, late = (planned.on.by_name[name] for name in planned.program.histories)
apart = early.nbytes + late.nbytes
print(f"index history: {early.nbytes // MIB} MiB at byte {early.offset}")
print(f"latent history: {late.nbytes // MIB} MiB at byte {late.offset}")
print(f"both together: {apart // MIB} -> {(apart - planned.saved) // MIB} MiB per rank")
print(f"reusable peak {planned.on.peak / MIB:.2f} MiB, lower bound {planned.on.lower_bound / MIB:.2f} MiB")

# %% Why is that the peak?
why = planned.explain()
print(f"the peak is at {why.peak_step}; alive there:")
for alive in why.alive[:4]:
    print(f"  {alive.buffer:<16} {alive.nbytes / MIB:8.1f} MiB  {alive.why}")

# %% Who shares bytes, and what makes it safe?
(shared,) = (reuse for reuse in why.reuses if (reuse.early, reuse.late) == planned.program.histories)
print(f"{shared.late} takes {shared.saved // MIB} MiB over from {shared.early}: {' -> '.join(shared.chain)}")

# %% What would other engines allocate for the same prefill? Each cell carries its formula and the file it was read in.
for bill in compare(geometry, Limits(1 << 20, 8192, 8), deployment=Deployment(device_bytes=80 * GIB, free_bytes=6 * GIB)):
    cell = bill.cell("latent gather")
    size = "not computable" if cell.nbytes is None else f"{cell.nbytes / MIB:,.0f} MiB ({cell.kind})"
    print(f"{bill.engine:<13} latent gather: {size:<22} {cell.formula or cell.note}")

# %% The inverse: the largest context of one sparse layer in 2 GiB per rank.
answer = fit(geometry, "2GiB", ranks=16, whole=False)
print(f"2 GiB per rank: {answer.limits.tokens:,} tokens; {answer.binding} grows most")

# %% The picture (needs: pip install 'palimpsest[report]').
if len(sys.argv) > 1:
    print(f"picture: {planned.write_html(Path(sys.argv[1]) / 'plan.html').name}")

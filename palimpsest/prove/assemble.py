"""Turn what the ranks returned into the value of record.json: facts in one place, the verdict by the algebra, nothing else
decided here.
"""

import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from palimpsest import recipes
from palimpsest.core.canon import digest, plain
from palimpsest.core.spec import Step
from palimpsest.prove import foreign
from palimpsest.prove import record as facts
from palimpsest.prove.cases import Case, audited_rows
from palimpsest.prove.enclosure import follows
from palimpsest.prove.evidence import file_digest
from palimpsest.prove.foreign_run import spilled
from palimpsest.prove.gates import ABSENT, GATES, combine, worse
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.schema import RECORD_SCHEMA

_REVISION = re.compile(r"^[0-9a-f]{40}$")
_READ = 8 << 20

Tree = dict[str, Any]


def assemble(
    setup: Setup, results: list[Any], *, run_id: str, source: Tree, synthetic: bool, elapsed_ns: int, failure: str | None
) -> tuple[Tree, list[Tree], list[Tree]]:
    """(record without the run's own names, flag lines, tie certificates). ``results`` is empty when the ranks failed."""
    flags = sorted((f for r in results for f in r["flags"]), key=_flag_order)
    ranks = [r["facts"] for r in results]
    certificates = [c for r in results for c in r["certificates"]] + _spilled(setup)
    kernels = foreign.load_all(setup.job.kernels)
    selecting = max((r["rows_selecting"] for r in ranks), default=0)
    gates = "ERROR" if failure is not None else combine(f["verdict"] for f in flags)
    if failure is None and not selecting:
        gates = worse(gates, "FAIL")
    verdict = worse(gates, "INCONCLUSIVE") if source["dirty"] else gates
    steps = [step.name for step in setup.program.steps]
    g, p = setup.geometry, setup.profile
    tree: Tree = {
        "schema": RECORD_SCHEMA,
        "run_id": run_id,
        "claim": facts.CLAIM.format(layer=setup.job.layer, name=g.name, ranks=p.ranks) + foreign.claim(setup.job.kernels),
        "non_claims": list(facts.NON_CLAIMS),
        "gates": foreign.gates_of(kernels),
        "kernels": [k.facts(s.name for s in setup.program.steps if s.op == op) for op, k in sorted(kernels.items())],
        "gates_absent": [*ABSENT, *(() if follows(setup.model) else ("O3",))],
        "source": source,
        "checkpoint": _checkpoint(setup, synthetic),
        "geometry": {name: value.hex() if isinstance(value, float) else value for name, value in plain(g).items()},
        "limits": asdict(p.limits),
        "profile": p.name,
        "engine": setup.job.engine,
        "facts": dict(plain(dict(setup.program.facts)).items()),
        "steps": steps,
        "plan": {name: facts.arrangement_facts(plan, steps) for name, plan in setup.plans.items()},
        "machine": facts.machine_facts(),
        "libraries": facts.installed_facts(),
        "numerics": _numerics(setup),
        "seeds": {"master": setup.job.seed},
        "cases": [_case(setup, case, flags, ranks) for case in setup.cases],
        "allocation": _allocation(setup, ranks),
        "selection": _selection(flags, certificates, selecting),
        "output": _output(flags),
        "density": _summed([r["extras"]["density"] for r in results]),
        "power": _summed([r["extras"]["power"] for r in results]),
        "capacity": results[0]["extras"]["capacity"] if results else {},
        "schedule": [_step(step) for step in setup.program.steps],
        "sparse": {"layers": [setup.job.layer], "rows_selecting": selecting},
        "bytes": _bytes(setup),
        "lint": {"files": ranks[0]["lint_files"] if ranks else 0},
        "elapsed_ns": {"total": elapsed_ns} | {c.id: _elapsed(ranks, c.id) for c in setup.cases} | _phases(ranks),
        "exit": 0 if gates == "PASS" else 1,
        "gates_verdict": gates,
        "verdict": verdict,
        "self_test": None,
        "failure": failure,
    }
    return tree, flags, certificates


def _step(step: Step) -> Tree:
    """Who touches what, for a reader that knows no program; an update is both."""
    found = {kind: sorted({name for access, name in step.accesses() if access in (kind, "update")}) for kind in ("read", "write")}
    return {"name": step.name, "phase": step.phase, "scope": step.scope, "reads": found["read"], "writes": found["write"]}


def _summed(parts: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Case -> counts, all ranks together."""
    made: dict[str, dict[str, int]] = {}
    for part in parts:
        for case, counts in part.items():
            for name, value in counts.items():
                made.setdefault(case, {}).setdefault(name, 0)
                made[case][name] += value
    return made


def _flag_order(flag: Tree) -> tuple[str, int, int]:
    return flag["case"], flag["rank"], list(GATES).index(flag["gate"])


def _spilled(setup: Setup) -> list[Tree]:
    """Certificates that ranks left in the run's private folder."""
    paths = [spilled(Path(setup.job.workdir), rank) for rank in range(setup.profile.ranks)]
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def _checkpoint(setup: Setup, synthetic: bool) -> Tree:
    """Files that hold this layer's tensors, and every tensor used with a digest of its own."""
    root, layer = setup.checkpoint.root, setup.job.layer
    used = recipes.attention_tensors(setup.geometry, layer, setup.prefix)
    scales = [f"{name}_scale_inv" for name in used]
    names = sorted({n for n in (*used, *scales) if n in setup.checkpoint.tensors})
    shards = sorted({setup.checkpoint.tensors[name].file for name in names})
    return {
        "name": setup.geometry.name,
        "revision": root.name if _REVISION.match(root.name) else None,
        "layer": layer,
        "synthetic": synthetic,
        "seed": _default_seed() if synthetic else None,
        "config_digest": file_digest(root / "config.json"),
        "files": [
            {"name": name, "bytes": (root / name).stat().st_size, "sha256": file_digest(root / name)}
            for name in ("config.json", *shards)
        ],
        "tensors": {name: _tensor_digest(root, setup.checkpoint.tensors[name]) for name in names},
    }


def _default_seed() -> int:
    from palimpsest.checkpoint.make import SEED

    return SEED


def _tensor_digest(root: Path, ref: Any) -> str:
    made = hashlib.sha256()
    with (root / ref.file).open("rb") as source:
        source.seek(ref.begin)
        left = ref.nbytes
        while left:
            piece = source.read(min(left, _READ))
            if not piece:
                break
            made.update(piece)
            left -= len(piece)
    return made.hexdigest()


def _numerics(setup: Setup) -> Tree:
    """The engine's arithmetic, each number with where it comes from."""
    model = setup.model
    return {
        **{name: value.hex() if isinstance(value, float) else value for name, value in asdict(model).items()},
        "byte_order": sys.byteorder,
        "torch_threads": torch.get_num_threads(),
    }


def _case(setup: Setup, case: Case, flags: list[Tree], ranks: list[Tree]) -> Tree:
    own = [f["verdict"] for f in flags if f["case"] == case.id]
    times = [r["times"].get(case.id, {}) for r in ranks]
    minima = dict(asdict(case.minima))
    planted = ["index_query", "head_weights", "appended index records"] if case.regime in ("lattice", "mixed") else []
    return {
        "id": case.id,
        "name": case.name,
        "regime": case.regime,
        "poison": sorted({step.poison for step in case.steps}),
        "steps": [
            {
                "history": step.history, "rows": step.rows, "regime": step.regime,
                "audited": [row for row, _ in audited_rows(setup.profile, step, setup.job.seed)],
            }
            for step in case.steps
        ],
        "minima": minima,
        "planted": planted,
        "verdict": combine(own),
        "start_ns": min((t[name][0] for t in times for name in t), default=0),
        "end_ns": max((t[name][1] for t in times for name in t), default=0),
    }  # fmt: skip


def _elapsed(ranks: list[Tree], case: str) -> int:
    """Longest time of one rank in a case, both arrangements."""
    return max((sum(stop - start for start, stop in r["times"].get(case, {}).values()) for r in ranks), default=0)


def _phases(ranks: list[Tree]) -> dict[str, int]:
    """Longest time of one rank in each phase: ``prepare``, ``C03 fill``, ``C03 replay``, ``C03 judge``, ..., ``lock``, ``probe``,
    ``soak``, ``seal``."""
    names = {name for r in ranks for name in r["phases"]}
    return {name: max(r["phases"].get(name, 0) for r in ranks) for name in sorted(names)}


def _allocation(setup: Setup, ranks: list[Tree]) -> Tree:
    """Logical, mapped and proportional bytes per rank; the two kinds are never derived from each other."""
    if not ranks:
        return {}
    first = ranks[0]
    return {
        "logical_base": first["requested"]["base"],
        "logical_alias": first["requested"]["alias"],
        "logical_difference": first["requested"]["base"] - first["requested"]["alias"],
        "mapped_base": dict(sorted(first["mapped"]["base"].items())),
        "mapped_alias": dict(sorted(first["mapped"]["alias"].items())),
        "pss_base": first["pss"]["base"],
        "pss_alias": first["pss"]["alias"],
        "pss_alias_by_rank": [r["pss"]["alias"] for r in ranks],
        "torch_peak_after_seal": max(r["torch_peak"] for r in ranks),
    }


def _selection(flags: list[Tree], certificates: list[Tree], selecting: int) -> Tree:
    changed = [c for c in certificates if c["between"] == ["base", "alias"]]
    members = [m["class"] for c in changed for m in c["certificate"]["members"]]
    return {
        "rows_selecting": selecting,
        "rows_compared": sum(f["n_checked"] for f in flags if f["gate"] == "K4"),
        "rows_changed": len(changed),
        "rows_reordered": len(certificates) - len(changed),
        "exact_tie": members.count("exact_tie"),
        "rounded_tie": members.count("rounded_tie"),
        "exact_scores": sum(f["n_checked"] for f in flags if f["gate"] == "K3"),
        "lattice_rows": sum(f["n_checked"] for f in flags if f["gate"] == "K5"),
    }


def _output(flags: list[Tree]) -> Tree:
    """Coordinates the oracle compared, and the largest difference over bound."""
    worst = [float.fromhex(f["worst"]) for f in flags if f["gate"] == "O2" and isinstance(f["worst"], str)]
    return {
        "oracle_coordinates": sum(f["n_checked"] for f in flags if f["gate"] == "O2"),
        "worst_over_bound": max(worst).hex() if worst else None,
        "tail_rows": sum(f["n_checked"] for f in flags if f["gate"] == "O1"),
    }


def _bytes(setup: Setup) -> Tree:
    """Where the two histories lie, for the report's first lines."""
    alias, base = setup.plans["alias"].by_name, setup.plans["base"].by_name
    return {
        "index_history": alias["index_history"].nbytes,
        "latent_history": alias["latent_history"].nbytes,
        "alias_index_offset": alias["index_history"].offset,
        "alias_latent_offset": alias["latent_history"].offset,
        "base_index_offset": base["index_history"].offset,
        "plan_digest": digest({name: plan.digest for name, plan in setup.plans.items()}),
    }

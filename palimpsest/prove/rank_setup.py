"""What a rank needs to qualify a layer, derived from a JSON job: geometry, program, both plans, the case table, the facts the
gates use.

Every rank derives the same values; their digests are agreed on before the first case.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from palimpsest import recipes
from palimpsest.checkpoint.index import Checkpoint, open_checkpoint
from palimpsest.core.canon import digest
from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Formats, Geometry, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Program
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.prove.bounds import AMX_1, AVX512_1, AVX_1, PORTABLE_1, Arithmetic
from palimpsest.prove.cases import Case, Profile, cases, records_of
from palimpsest.prove.data import Data
from palimpsest.prove.expect import ARRANGEMENTS, Prepared
from palimpsest.prove.foreign import FOREIGN_32
from palimpsest.prove.gates_output import OutputFacts
from palimpsest.prove.oracle import LatentFormat
from palimpsest.prove.verdicts import IndexFacts
from palimpsest.run.weights import Filler, from_checkpoint

#: engine -> how it rounds; an engine without an entry has no derived bounds and cannot be qualified
ARITHMETIC: dict[str, Arithmetic] = {"portable": PORTABLE_1, "avx": AVX_1, "avx512": AVX512_1, "amx": AMX_1}


@dataclass(frozen=True)
class Job:
    """One qualification as JSON: checkpoint folder, layer, sizes, seed, engine, stored dtypes, private folder.

    alone:  each rank has a process for itself
    only:   ids of the cases and names of the replays of their own (lock, probe, soak) to run; all when empty (a record needs all)
    kernels: op -> ``module:function`` of a foreign implementation
    """

    model: str
    layer: int
    profile: Profile
    seed: int
    engine: str
    formats: Formats
    workdir: str
    alone: bool
    only: tuple[str, ...] = ()
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "Job":
        values = dict(tree)
        return cls(
            **values
            | {"profile": Profile(**values["profile"]), "formats": Formats(**values["formats"]), "only": tuple(values["only"])}
        )


class Setup:
    """Everything derived from a job that all ranks share."""

    def __init__(self, job: Job):
        self.job, self.profile = job, job.profile
        self.checkpoint: Checkpoint = open_checkpoint(job.model)
        self.geometry: Geometry = recipes.geometry_from_config(dict(self.checkpoint.config), self.checkpoint.root.name)
        self.prefix = recipes.resolve_prefix(self.geometry, self.checkpoint.tensors)
        self.program: Program = recipes.program(self.geometry, self.profile.limits, job.formats, job.layer, engine=job.engine)
        if not self.program.histories:
            raise Unsupported(
                f"layer {job.layer} of {self.geometry.name} keeps the ids of another layer and has no index history to reuse; "
                f"full layers are {', '.join(map(str, self.geometry.full_layers[:8]))}"
            )
        if job.engine not in ARITHMETIC:
            raise Unsupported(
                f"engine {job.engine!r} has no derived error bounds; engines that can be qualified: {', '.join(ARITHMETIC)}"
            )
        self.model = ARITHMETIC[job.engine]
        self.plans: dict[str, Plan] = {"base": place(self.program, "off"), "alias": place(self.program, "on")}
        table = cases(self.profile, self.geometry.indexer.topk, records_of(self.geometry, job.formats))
        self.cases: tuple[Case, ...] = tuple(c for c in table if not job.only or c.id in job.only)

    @cached_property
    def digest(self) -> str:
        """One digest of program, plans and cases, for the ranks to agree on."""
        return digest(
            [
                self.program.digest,
                {k: p.digest for k, p in self.plans.items()},
                self.cases,
                self.job.seed,
                sorted(self.job.kernels.items()),
            ]
        )

    def data(self, case: Case) -> Data:
        """The seeded inputs of a case."""
        return Data(self.job.seed, self.geometry, self.job.formats, case)

    def filler(self) -> Filler:
        """Reads this layer's weights from the checkpoint."""
        scope = f"{self.prefix}layers.{self.job.layer}.self_attn." if all(self.geometry.block_fp8) else ""

        def slices(rank: int, ranks: int) -> dict[str, recipes.WeightSlice]:
            return recipes.weight_slices(self.geometry, self.job.layer, rank, ranks, self.prefix)

        return from_checkpoint(self.checkpoint, slices, recipes.tables(self.geometry), scope=scope)

    @property
    def prepared(self) -> Prepared:
        views = sum(len(plan.places) for plan in self.plans.values())
        local = self.geometry.heads // self.profile.ranks
        return Prepared(self.profile, self.geometry.indexer.topk, views, local * self.geometry.kv_lora, self.job.seed)

    @property
    def index_facts(self) -> IndexFacts:
        g, p, f = self.geometry, self.profile, self.job.formats
        records = records_of(g, f)
        return IndexFacts(
            topk=g.indexer.topk, heads=g.indexer.heads, dim=g.indexer.dim, format=f.index, page=p.page, ranks=p.ranks,
            alias_end=records.index * p.tokens // records.latent, model=self.model,
        )  # fmt: skip

    @property
    def output_facts(self) -> OutputFacts:
        g, f = self.geometry, self.job.formats
        layout = LatentFormat(f.latent, g.kv_lora, g.rope.dims, g.latent_scale)
        return OutputFacts(
            rows=self.profile.rows,
            topk=g.indexer.topk,
            heads=g.heads // self.profile.ranks,
            hidden=g.hidden,
            activation=f.activation,
            softmax_scale=g.softmax_scale,
            layout=layout,
            model=FOREIGN_32 if "sparse_attend" in self.job.kernels else self.model,
        )

    @property
    def record_bytes(self) -> dict[str, int]:
        """Cache -> bytes of one token."""
        return {
            "index_cache": index_record_bytes(self.geometry, self.job.formats),
            "latent_cache": latent_record_bytes(self.geometry, self.job.formats),
        }

    @property
    def queues(self) -> list[list[Case]]:
        """Cases in order; those of one queue together."""
        groups: list[list[Case]] = []
        for case in self.cases:
            if groups and case.queue and groups[-1][-1].queue == case.queue:
                groups[-1].append(case)
            else:
                groups.append([case])
        return groups


def workdir(job: Job) -> Path:
    return Path(job.workdir)


assert ARRANGEMENTS == ("base", "alias")

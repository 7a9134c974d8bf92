"""The mutants of the qualifier's self-test, as data: what is wrong, where it is injected, and which gate has to notice.

M01 to M48 are the table of the qualifier's specification; those named after a gate (``S1`` to ``V5``) exist because that gate
would otherwise have nothing that it alone kills; ``OK`` entries are positive controls that every gate must pass. A mutant of
selection or output comes in two forms: ``alias-only`` (the other arrangement is healthy) and ``common-mode`` (both
arrangements and the recorded tail are wrong, so that only independent gates can tell). Nothing here runs; ``mutations.py``
holds the actions.
"""

from dataclasses import dataclass

ALIAS, COMMON, ONCE, BOTH = "alias-only", "common-mode", "once", ""
#: parts of a run beside the cases: plans and mappings, another process's views, lock and shadow, probes, soak under a cap,
#: capacity law
PARTS = ("seal", "views", "locked", "probed", "soak", "law")
#: what kills where no gate of the registry can: readers of checkpoints and records, and the judgement of the matrix itself
OUTSIDE = {
    "parser": "the reader of the file refuses it",
    "verify": "the record checker refuses it",
    "self-test": "the matrix without the gate is refused",
}


@dataclass(frozen=True)
class Mutant:
    """One row of the kill matrix.

    id:     unique: the number in the specification, and a variant after a slash
    kind:   ``layer`` (in-process ranks), ``plan`` (plans only), ``ranks`` (real processes), ``tool`` (the qualifier's own parts),
            ``record``
    point:  the step, file or object it is injected at; action: name in ``mutations.ACTIONS``; argument: of the action
    seed:   of the in-process scheduler
    gates:  designated: all of them must notice
    cases, parts: of the run; ranks: how many; alone: one rank that has its process for itself; kernels: ops bound as foreign
        kernels
    """

    id: str
    title: str
    kind: str
    point: str
    action: str
    gates: tuple[str, ...]
    form: str = ONCE
    argument: str = ""
    cases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    ranks: int = 2
    alone: bool = False
    kernels: tuple[str, ...] = ()
    seed: int = 1

    @property
    def number(self) -> str:
        """The mutant without its variant."""
        return self.id.partition("/")[0]

    @property
    def control(self) -> bool:
        """A positive control: nothing may notice."""
        return self.number.startswith("OK")


def _layer(
    id_: str, title: str, point: str, action: str, gates: str, case: str = "C02", form: str = COMMON, **more: object
) -> Mutant:
    return Mutant(id_, title, "layer", point, action, tuple(gates.split()), form, cases=tuple(case.split()), **more)  # type: ignore[arg-type]


def _both(
    id_: str, title: str, point: str, action: str, alias: str, common: str, case: str = "C02", **more: object
) -> tuple[Mutant, Mutant]:
    """The two forms; ``parts`` belong to the common one."""
    plain = {name: value for name, value in more.items() if name != "parts"}
    return (
        _layer(f"{id_}/alias", title, point, action, alias, case, ALIAS, **plain),
        _layer(f"{id_}/common", title, point, action, common, case, COMMON, **more),
    )


def _plan(id_: str, title: str, point: str, action: str, gates: str) -> Mutant:
    return Mutant(id_, title, "plan", point, action, tuple(gates.split()))


def _tool(id_: str, title: str, point: str, action: str, gates: str, **more: object) -> Mutant:
    return Mutant(id_, title, "tool", point, action, tuple(gates.split()), **more)  # type: ignore[arg-type]


def _ranks(id_: str, title: str, point: str, action: str, gates: str, argument: str = "") -> Mutant:
    return Mutant(id_, title, "ranks", point, action, tuple(gates.split()), argument=argument)


#: phases of a layer, as a rank reports them; p4 is inside p3 (one step scores and selects)
PHASES = ("p0", "p1", "p2", "p3", "p5", "barrier", "p6", "p7", "p8")

_STORAGE = (
    _plan("M01/static", "latent gather scheduled before the selection", "program", "reordered", "S7"),
    _layer("M01/run", "latent gather runs before the selection", "index_select", "latent_first", "X4", form=ALIAS),
    _ranks("M01/lock", "latent history read before the barrier, on real ranks", "index_select", "early_read", "S7"),
    _layer("M02", "barrier removed, rank 1 delayed", "selection_barrier", "no_barrier_late", "S7"),
    _layer("M03", "barrier removed, nobody late", "selection_barrier", "no_barrier", "S7"),
    _plan("M04", "index history one byte off", "alias plan", "offset_by_one", "S2 S3"),
    _layer("M05/up", "scale plane read one record late", "gather_index", "scales_up", "X4"),
    _layer("M05/down", "scale plane read one record early", "gather_index", "scales_down", "X4"),
    _plan("M06", "alias one byte a token short", "alias plan", "shorter_alias", "S1"),
    _plan("M07", "alias lost: the latents have bytes of their own", "alias plan", "alias_lost", "S3 A1"),
    _plan("M08/plan", "staging laid on the latents' tail", "alias plan", "staging_on_latent", "S3"),
    _layer("M08/run", "staging mapped in reusable memory", "arena", "staging_inside", "S10", case="", parts=("views",)),
    _layer("M09", "one record written past the visible tokens", "gather_index", "past_visible", "S6"),
    _layer("M10", "written past the planned bytes", "gather_latent", "into_slack", "S6"),
    _layer("M11", "last tokens of the index not gathered", "gather_index", "skip_last", "S8 X4", case="C04", parts=("locked",)),
    _layer(
        "M12", "attention reads index bytes for the first ids", "sparse_attend", "index_bytes_stay", "O1 O4", parts=("probed",)
    ),
    _layer("M13", "a view whose address is not the sealed one", "bind_inputs", "stale_pointer", "S4"),
    _layer("M14", "a worker that copies views", "roundtrip", "copied_views", "S9", case="", parts=("views",)),
)

_ALLOCATION = (
    _layer("M15", "a temporary inside a step", "project_output", "temporary", "A3", case="C03", ranks=1, alone=True),
    _layer(
        "M16",
        "a workspace taken at the longest history only",
        "append_index",
        "lazy_workspace",
        "A3",
        case="C03",
        ranks=1,
        alone=True,
    ),
    _layer("M17", "1 KiB lost in every replay", "project_output", "leak", "A6", case="", ranks=1, alone=True, parts=("soak",)),
    _layer("M18", "a mapping nobody planned", "arena", "extra_mapping", "A2", case="", parts=("seal",)),
)

_INPUTS = (
    _layer("M19", "a bit of the index cache, token not selected", "exchange_ids", "index_cache_bit", "S5"),
    _layer("M20", "a bit of the latent cache before its gather", "gather_latent", "latent_cache_bit", "S5"),
    _tool("M21/header", "a shard whose header lies about a tensor", "checkpoint", "lying_header", "parser"),
    _tool("M21/short", "a shard that lost its last byte", "checkpoint", "short_shard", "parser"),
    _layer("M22", "two pages swapped in the history", "gather_index", "swapped_pages", "X4"),
    _layer("M23", "one token too many visible", "index_select", "visible_more", "X4 K1", case="C01"),
    _layer("M24", "one token too few visible", "index_select", "visible_less", "X4 K1", case="C06"),
    _layer("M25/attention", "another row's attention query", "attention_query", "other_query", "X2", form=ALIAS),
    _layer("M25/index", "another row's index query", "index_query", "other_index_query", "X2", form=ALIAS),
    _layer("M26", "head weights permuted", "index_query", "permuted_weights", "X3", form=ALIAS),
)

_SELECTION = (
    *_both("M27", "best id dropped, the next best below the cutoff taken", "index_select", "drop_best", "K2 K4", "K2 K3"),
    *_both("M28", "nearest id below the cutoff taken for the one at it", "index_select", "next_below", "K2 K4", "K2"),
    *_both("M29", "an id twice", "index_select", "duplicate_id", "K1 K2", "K1 K2"),
    _layer("M30", "another rank's ids left from the replay before", "exchange_ids", "stale_ids", "X5", case="C08"),
    _layer("M31", "rows past the chunk not padded", "exchange_ids", "unpadded", "K1", case="C05"),
    _layer("M32", "ids of a rank received one row off", "exchange_ids", "shifted_ids", "X5"),
    *_both("M33", "NaN poison left in the index, taken as nothing", "gather_index", "nan_left", "X4", "X4 S8", parts=("locked",)),
    *_both("M34", "scales zeroed: every score ties at zero", "gather_index", "tie_flood", "X4 K2", "X4 K3"),
)

_OUTPUT = (
    _layer("M35", "attention in another order than emitted", "sparse_attend", "turned_ids", "O1", form=ALIAS),
    *_both("M36", "probabilities truncated to bf16", "sparse_attend", "truncated", "O1", "O3"),
    *_both("M37", "a head reads its neighbour's query", "sparse_attend", "neighbour", "O1", "O2"),
    *_both("M38/half", "the last half of the ids ignored", "sparse_attend", "ignore_half", "O1", "O2"),
    *_both("M38/one", "the last id ignored", "sparse_attend", "ignore_one", "O1", "O4", parts=("probed",)),
    *_both("M39", "attention rows shifted by one", "sparse_attend", "shifted_rows", "O1", "O2"),
    _layer("M40", "the signals' generation not advanced", "selection_barrier", "stale_signal", "S7"),
)

_PROCESSES = (
    *(_ranks(f"M41/{phase}", f"a rank killed in {phase}", phase, "killed", "L1", phase) for phase in PHASES),
    _ranks("M42", "a rank stopped past the deadline", "p6", "stopped", "L2", "p6"),
    _ranks("M43", "a rank raises while the others wait", "p5", "raises", "L1", "p5"),
    _layer("M44", "a rank that says PASS and looks at nothing", "sheets", "unchecked", "V1"),
    _ranks("M45/source", "a rank of another source", "agree", "other_source", "L4", "source"),
    _ranks("M45/plan", "a rank with another plan", "agree", "other_plan", "L4", "plan"),
    Mutant("M46", "a record edited, cut, or without a rank's cells", "record", "evidence", "edited_record", ("verify",)),
    _tool("M48", "the oracle's error bound made wider", "arithmetic", "wide_bound", "O5"),
)

_NECESSARY = (
    _plan("S1", "a buffer that ends outside its segment", "alias plan", "outside_segment", "S1"),
    _layer(
        "A1", "the aliased arena takes the index history's bytes as well", "arena", "own_bytes", "A1", case="", parts=("seal",)
    ),
    _layer("A4", "the cap is not set", "capacity.Cap", "no_cap", "A4", case="", ranks=1, alone=True, parts=("soak",)),
    _layer("A5", "nothing is saved at one length", "extras.place", "no_saving", "A5", case="", parts=("seal", "law")),
    _layer("X1", "caches of the arrangements differ before the replay", "fill", "other_fill", "X1", form=ALIAS),
    _layer("X6", "a weight changed after its last use", "reduce_output", "weight_bit", "X6"),
    _layer("K3", "scores of one row made with another head weight", "index_select", "other_weight", "K3", argument="0"),
    _layer("K4", "the certificate of a tie is over other bytes", "index_select", "forged_tie", "K4", case="C03", form=ALIAS),
    _layer(
        "K5",
        "a lattice score off in a row that is not audited",
        "index_select",
        "other_weight",
        "K5",
        case="C03",
        argument="quiet",
    ),
    _layer("K6", "the row whose scores are all zero is not there", "data", "no_ties", "K6", case="C03"),
    _layer("K7", "a foreign selector takes a wrong id", "index_select", "foreign", "K7", kernels=("index_select",)),
    _layer("B1", "a foreign projection writes another bit", "query_latent", "foreign", "B1", kernels=("query_latent",)),
    _layer("O0", "a tail that drifts", "sparse_attend", "drifting", "O0"),
    _layer("O1s", "attention blind to its ids", "sparse_attend", "blind", "O1s"),
    _layer("O6", "outputs that are not finite, in both arrangements and the tail", "project_output", "not_finite", "O6"),
    _layer("O3", "a coordinate off by less than the worst-case bound", "sparse_attend", "nudged", "O3"),
    _ranks("L2", "a rank that runs without the deadline", "identity", "no_deadline", "L2"),
    _ranks("L3", "a memory file left open", "parent", "left_open", "L3"),
    _layer("V2", "the poison is not laid", "poison", "no_poison", "V2"),
    _layer("V3", "the planted records are not there", "data", "no_beacons", "V3", case="C03"),
    _tool("V4", "a self-test of another source", "licence", "other_licence", "V4"),
    _tool("V5", "a tolerance in the qualifier", "lint", "planted_tolerance", "V5"),
)

CONTROLS = (
    _layer("OK1", "healthy: all cases, all gates", "nothing", "healthy", "", case="", parts=PARTS, argument="all"),
    _layer("OK2", "other order of the ranks", "scheduler", "healthy", "", case="C03 C09 C10 C11", seed=77),
    _layer("OK3", "other base addresses", "arena", "other_addresses", "", case="C02"),
    _layer("OK4", "zeros of either sign in the scores", "index_select", "negative_zeros", "", case="C03"),
    _layer("OK5", "head weights times a power of two", "index_query", "scaled_weights", "", case="C02"),
    _layer("OK6", "other bytes in tokens that nobody sees", "fill", "invisible_bytes", "", case="C02"),
    _layer(
        "OK7",
        "one rank that has its process for itself",
        "nothing",
        "healthy",
        "",
        case="C03",
        ranks=1,
        alone=True,
        parts=("soak",),
    ),
    _ranks("OK8", "real ranks, nothing wrong", "nothing", "well", ""),
)

MUTANTS: tuple[Mutant, ...] = (*_STORAGE, *_ALLOCATION, *_INPUTS, *_SELECTION, *_OUTPUT, *_PROCESSES, *_NECESSARY, *CONTROLS)
#: every mutant by its id
BY_ID: dict[str, Mutant] = {mutant.id: mutant for mutant in MUTANTS}

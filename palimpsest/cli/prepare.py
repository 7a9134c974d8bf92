"""``palimpsest prepare``: a checkpoint's layer as a core folder, which ``palimpsest-loader`` runs without this package."""

import argparse
import os
import sys
import time
from pathlib import Path

NAME = "prepare"
HELP = "compile one layer into a core: stages, weights and plan, to run with palimpsest-loader alone"
#: names the ``--json`` form
FORMAT = "palimpsest-prepare-report-1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder")
    parser.add_argument("-o", "--output", metavar="CORE", required=True, help="the core folder to make; it must not exist")
    parser.add_argument("--layer", metavar="N", type=int, help="0-based layer (default: the first one that runs an indexer)")
    parser.add_argument("--ranks", metavar="N", default="1", help="tensor-parallel ranks (default: 1)")
    parser.add_argument(
        "--context", metavar="TOKENS", help="history tokens to prepare, such as 256K or 1M (default: the model's own maximum)"
    )
    parser.add_argument("--rows", metavar="ROWS", default="4096", help="query rows of one prefill chunk (default: 4096)")
    parser.add_argument("--page", metavar="TOKENS", default="64", help="tokens of one cache page and shard block (default: 64)")
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="compile workers (default: half the CPUs)",
    )
    parser.add_argument("--isa", metavar="SET", help="instruction set: avx512 or avx2 (default: the widest of this machine)")
    parser.add_argument(
        "--engine",
        choices=("portable", "avx"),
        default="portable",
        help="whose selection the core holds: portable (compiled by torch), or avx (this package's own kernels as native code)",
    )
    parser.add_argument("--store", metavar="FOLDER", help="compiled programs to reuse (default: ~/.cache/palimpsest/store)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=1800.0, help="limit of one compile job (default: 1800)"
    )
    parser.add_argument("--json", action="store_true", help="canonical JSON on stdout, everything else on stderr")


def run(args: argparse.Namespace) -> int:
    """Prepare and say the digest. Raises UserError for anything the user can fix; then nothing is published."""
    import warnings

    from palimpsest.core.errors import BadConfig
    from palimpsest.export.checkpoint import plan_layer
    from palimpsest.export.prepare import Options, prepare_core, refuse_taken

    if args.jobs < 1 or args.timeout <= 0:
        raise BadConfig(f"--jobs {args.jobs} and --timeout {args.timeout:g} must be positive")
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")  # torch.export's own
    output, started = Path(args.output), time.monotonic()
    refuse_taken(output)
    sizes = {"context": args.context, "rows": args.rows, "ranks": args.ranks, "page": args.page}
    layer = plan_layer(Path(args.checkpoint), args.layer, **sizes, engine=args.engine)
    store = (
        Path(args.store)
        if args.store
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest" / "store"
    )
    options = Options(store, args.jobs, args.isa, args.timeout)

    def say(name: str, what: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {name}: {what}", file=sys.stderr, flush=True)

    made = prepare_core(layer.program, layer.plan, layer.fill, output, options, progress=say)
    nbytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    if args.json:
        from palimpsest.core.canon import canonical

        print(
            canonical(
                {
                    "format": FORMAT,
                    "core": str(output),
                    "digest": made.digest,
                    "programs": made.programs,
                    "hits": made.hits,
                    "bytes": nbytes,
                }
            )
        )
    else:
        print(
            f"core     {output}\ndigest   {made.digest}\n"
            f"programs {made.programs}, {made.hits} from the store\nbytes    {nbytes:,}"
        )
    return 0

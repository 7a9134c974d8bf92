"""``palimpsest qualify``: run the eleven cases in both arrangements on real rank processes and publish the evidence."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAME = "qualify"
HELP = "prove on a checkpoint layer, across ranks, that the planned reuse of memory changes no byte"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="DIR", nargs="?",
        help="checkpoint folder, or a prepared core (default: a tiny checkpoint, made and removed; full profile: Kimi K3.1-Pro's "
            "layer 3 with synthetic weights)",
    )  # fmt: skip
    parser.add_argument("--layer", type=int, metavar="N", help="0-based layer (default: the first one that runs an indexer)")
    parser.add_argument("--ranks", type=int, metavar="N", help="rank processes (default: the profile's; 4 without DIR)")
    parser.add_argument(
        "--profile", default="small", metavar="P",
        help=("small: 4,096 tokens; wide: 1,048,576 tokens, 4 ranks; full: the same with 4,096 rows, 16 "
            "ranks, slow (default: small)"),
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all inputs (default: a fixed one)")
    parser.add_argument(
        "--engine", metavar="E", help="kernels to qualify (default: portable; full profile: the fastest that runs here)"
    )
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="OP=M:F",
        help=("qualify function F of Python module M in place of our kernel for OP; imports M, from this "
            "folder too; may be given again for other ops"),
    )  # fmt: skip
    parser.add_argument(
        "--evidence", default="evidence", metavar="FOLDER", help="where evidence folders are kept (default: ./evidence)"
    )
    parser.add_argument(
        "--self-test-record",
        metavar="FILE",
        help="kill matrix that licenses this source (default: the one in the user's cache folder, if any)",
    )
    parser.add_argument(
        "--digest", metavar="SHA256", help="when DIR is a prepared core: its manifest digest, as prepare printed it"
    )
    parser.add_argument("--trust", action="store_true", help="when DIR is a prepared core of your own: load it without a digest")
    parser.add_argument(
        "--against", metavar="CKPT", help="when DIR is a prepared core: also compare it with the eager engine on CKPT"
    )
    parser.add_argument(
        "--self-test",
        action="store_true",
        help=(
            "show that this qualifier can fail: run every mutant, print the kill matrix, keep it in the "
            "user's cache folder (or in --evidence, if given)"
        ),
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as one HTML page (no network)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON on stdout, everything else on stderr")


def run(args: argparse.Namespace) -> int:
    """0 when every gate passed, 1 when one did not or a rank failed, 2 when the input is wrong."""
    import os
    from pathlib import Path

    if args.self_test:
        return _self_test(args, _cache(dict(os.environ)))

    from palimpsest.prove.qualify import SEED, Request, qualify

    if args.model is not None and (Path(args.model) / "manifest.json").is_file():
        return _core(args, Path(args.model))
    if args.kernel:
        from palimpsest.prove.foreign import search_here

        search_here(os.getcwd())
    request = Request(
        model=None if args.model is None else Path(args.model), layer=args.layer, profile=args.profile, ranks=args.ranks,
        seed=SEED if args.seed is None else args.seed, engine=args.engine, evidence=Path(args.evidence), argv=tuple(sys.argv[1:]),
        environment=dict(os.environ), kernels=tuple(args.kernel),
        self_test=None if args.self_test_record is None else Path(args.self_test_record), cache=_cache(dict(os.environ)),
    )  # fmt: skip
    if args.html:
        from palimpsest.report.qualify_html import ready, write_report

        ready(Path(args.html))
    with _Shown() as progress:
        outcome = qualify(request, progress, progress.compiling)
    if args.html:
        print(f"report: {write_report(outcome.folder, Path(args.html))}", file=sys.stderr)
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical(outcome.record | {"evidence": str(outcome.folder)}))
    else:
        from palimpsest.report.qualify_text import show

        show(outcome.record, outcome.flags, str(outcome.folder))
    return 0 if outcome.passed else 1


def _core(args: argparse.Namespace, folder: "Path") -> int:
    """Qualify a prepared core: its own binaries under both arrangements, and against the eager engine with ``--against``."""
    from pathlib import Path

    from palimpsest.core.errors import BadConfig
    from palimpsest.export.qualify_core import Gate, qualify_core
    from palimpsest_loader.errors import CoreError

    def say(gate: Gate) -> None:
        print(f"{gate.name}: {'PASS' if gate.passed else 'FAIL'}", file=sys.stderr)

    against = None if args.against is None else Path(args.against)
    try:
        report = qualify_core(folder, args.digest, trust=args.trust, model=against, notify=say)
    except CoreError as error:
        raise BadConfig(str(error)) from None
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical({"core": report.core, "digest": report.digest, "passed": report.passed, "gates": report.gates}))
    else:
        print(report.text())
        if against is None:
            print("not compared with the eager engine: give the checkpoint with --against")
    return 0 if report.passed else 1


def _self_test(args: argparse.Namespace, cache: "Path") -> int:
    """0 when every mutant was killed by its gates and every gate is needed, else 1."""
    from pathlib import Path

    from palimpsest.core.errors import BadConfig
    from palimpsest.prove import selftest

    given = [name for name in ("model", "layer", "ranks", "seed", "kernel", "self_test_record", "html") if getattr(args, name)]
    if given:
        raise BadConfig(f"--self-test runs mutants of its own and takes no {given[0].replace('_', '-')}; leave it out")
    with _Counted(len(selftest.MUTANTS)) as progress:
        matrix = selftest.run(progress=progress)
    path = selftest.save(matrix, (cache if args.evidence == "evidence" else Path(args.evidence)) / selftest.FILE)
    if args.json:
        from palimpsest.core.canon import canonical

        print(canonical(matrix))
    else:
        from palimpsest.report.kill_matrix import show

        show(matrix)
    print(f"{selftest.summary(matrix)}\nkill matrix: {path}", file=sys.stderr)
    return 0 if matrix["verdict"] == "PASS" else 1


def _cache(environment: dict[str, str]) -> "Path":
    """The user's cache folder of this program."""
    from pathlib import Path

    named = environment.get("XDG_CACHE_HOME", "")
    return (Path(named) if named.startswith("/") else Path.home() / ".cache") / "palimpsest"


class _Shown:
    """Progress on stderr: a line that moves on a terminal, one line a case elsewhere."""

    def __enter__(self) -> "_Shown":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._live = self._console.is_terminal
        self._task = self._bar.add_task("starting ranks", total=24)
        self._done: set[tuple[str, str]] = set()
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._bar.stop()

    def compiling(self, done: int, total: int, what: str) -> None:
        """Kernels are compiled before ranks start: seconds the first time."""
        self._bar.update(self._task, description=f"compiling {what} ({done + 1}/{total})" if what else "starting ranks")

    def __call__(self, rank: int, event: Any) -> None:
        key = event["arrangement"], event["case"]
        text = f"{event['case']} {event['arrangement']} {event['phase']}"
        if event.get("replays", 1) > 1:
            text += f" {event['replay'] + 1}/{event['replays']}"
        if key not in self._done:
            self._done.add(key)
            if not self._live:
                self._console.print(f"{event['case']} {event['arrangement']}", markup=False)
        self._bar.update(self._task, completed=len(self._done), description=f"{text} rank {rank}")


class _Counted:
    """Progress of the self-test on stderr: a bar on a terminal, a line for what is not well elsewhere."""

    def __init__(self, total: int):
        self._total = total

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("starting workers", total=self._total)
        if self._console.is_terminal:
            self._bar.start()
        return self._done

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _done(self, done: int, total: int, mutant: str, well: bool) -> None:
        self._bar.update(self._task, completed=done, description=mutant)
        if not well:
            self._console.print(f"{mutant}: not as it must be", markup=False)
        elif not self._console.is_terminal and done % 20 == 0:
            self._console.print(f"{done} of {total} runs", markup=False)

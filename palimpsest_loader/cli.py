"""``palimpsest-loader``: show, verify and run a core. Results on stdout, errors on stderr; exit 2 when the core or request is
refused.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from palimpsest_loader.errors import CommError, CoreError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palimpsest-loader", description="Runs prepared cores with torch and nothing of the model code."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, text in (("digest", "print the digest of a core's manifest"), ("verify", "check every file and view of a core"),
                       ("run", "replay prefill chunks and print a digest of the output")):  # fmt: skip
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("core", metavar="CORE", help="core folder")
        if name != "digest":
            trust = verb.add_mutually_exclusive_group(required=True)
            trust.add_argument("--digest", metavar="SHA256", help="the manifest's digest, as told by who prepared the core")
            trust.add_argument("--trust", action="store_true", help="a core of your own: do not ask for its digest")
        if name == "run":
            verb.add_argument(
                "--chunks", metavar="N,N,..", help="rows of each prefill chunk (default: one full chunk, then one row)"
            )
            verb.add_argument("--seed", metavar="N", type=int, default=0, help="of the normal hidden rows (default: 0)")
            verb.add_argument("--hidden", metavar="FILE", help="raw little-endian fp32 rows instead of random ones")
            verb.add_argument(
                "--output", metavar="FILE", help="write the output rows there, raw, in the activation dtype (rank 0)"
            )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Parse and run; every refusal is one line."""
    args = build_parser().parse_args(argv)
    try:
        return {"digest": _digest, "verify": _verify, "run": _run}[args.verb](args)
    except (CoreError, CommError) as error:
        print(f"palimpsest-loader {args.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CoreError) else 1
    except OSError as error:
        print(f"palimpsest-loader {args.verb}: {error.strerror or error} {error.filename or ''}", file=sys.stderr)
        return 2


def _digest(args: argparse.Namespace) -> int:
    from palimpsest_loader.core import digest_of

    print(digest_of(args.core))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from palimpsest_loader.core import load

    core = load(args.core, args.digest, trust=args.trust)
    print(
        f"{core.tree['name']}: {len(core.programs)} programs, {core.ranks} ranks, {core.tree['limits']['tokens']:,} tokens: good"
    )
    return 0


def _comm() -> Any:
    """The ranks that torchrun started, or this process alone."""
    from palimpsest_loader.comm import Alone, Distributed

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    import torch.distributed as dist

    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    return Distributed()


def _run(args: argparse.Namespace) -> int:
    import ctypes
    import hashlib

    import torch  # noqa: F401  # before the clock starts

    from palimpsest_loader.core import load

    comm, started = _comm(), time.perf_counter()
    core = load(args.core, args.digest, trust=args.trust, rank=comm.rank)
    with core.bind(comm) as session:
        ready, limits, width = time.perf_counter() - started, core.tree["limits"], session.view("hidden").shape[1]
        chunks = _chunks(args.chunks, limits)
        hidden = _hidden(args, sum(chunks), width)
        history, found, parts = 0, hashlib.sha256(), []
        for rows in chunks:
            out = session.prefill(hidden[history : history + rows], history)
            parts.append(ctypes.string_at(out.data_ptr(), out.numel() * out.element_size()))
            found.update(parts[-1])
            history += rows
        if comm.rank == 0:
            if args.output:
                Path(args.output).write_bytes(b"".join(parts))
            print(f"core    {core.tree['name']}  {core.digest[:16]}")
            print(f"ready   {ready * 1e3:.0f} ms after import torch")
            print(f"chunks  {','.join(map(str, chunks))}  {history:,} tokens")
            print(f"output  sha256 {found.hexdigest()}")
    return 0


def _chunks(text: str | None, limits: dict[str, int]) -> list[int]:
    if text is None:
        rows = limits["rows"]
        return [rows, 1] if limits["tokens"] > rows else [rows]
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise CoreError(f"--chunks {text!r} is not a list of whole numbers like 64,32,1") from None


def _hidden(args: argparse.Namespace, rows: int, width: int) -> Any:
    import torch

    if args.hidden is None:
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(args.seed))
    data = bytearray(Path(args.hidden).read_bytes())
    if len(data) != rows * width * 4:
        raise CoreError(f"{args.hidden} has {len(data):,} bytes; {rows} rows of {width} fp32 are {rows * width * 4:,}")
    return torch.frombuffer(data, dtype=torch.float32).view(rows, width)

"""``palimpsest checkpoint``: make small deterministic checkpoints to plan, qualify and test with."""

import argparse

NAME = "checkpoint"
HELP = "make a small deterministic checkpoint folder, or list the presets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("make", help="write a preset as a Hugging Face folder: config.json, sharded safetensors, index")
    make.add_argument("preset", metavar="PRESET", help="see: palimpsest checkpoint list")
    make.add_argument("directory", metavar="DIR", help="new folder to write; it appears complete or not at all")
    make.add_argument("--seed", type=int, default=None, metavar="N", help="the same seed gives the same bytes on every machine")
    actions.add_parser("list", help="the presets, one a line")


def run(args: argparse.Namespace) -> int:
    return _list() if args.action == "list" else _make(args)


def _list() -> int:
    from palimpsest.checkpoint.synthetic import PRESETS

    width = max(map(len, PRESETS))
    for name, shape in PRESETS.items():
        print(
            f"{name:<{width}}  {shape.family:<12}  layers {shape.schedule:<5}  heads {shape.heads:<2}  hidden {shape.hidden:<3}  "
            f"index {shape.index_heads} x {shape.index_dim}  top-k {shape.topk}" + ("  fp8 blocks" if shape.fp8 else "")
        )
    print("layers: F full (own indexer), S shared (ids of the full layer before), L linear attention")
    return 0


def _make(args: argparse.Namespace) -> int:
    from palimpsest.checkpoint.index import open_checkpoint
    from palimpsest.checkpoint.make import SEED, make
    from palimpsest.core.units import format_bytes

    seed = SEED if args.seed is None else args.seed
    checkpoint = open_checkpoint(make(args.preset, args.directory, seed=seed))
    print(
        f"{args.directory}: {args.preset}, seed {seed}, {len(checkpoint.tensors)} tensors, {format_bytes(checkpoint.nbytes)} "
        f"in {len(checkpoint.files)} files"
    )
    return 0

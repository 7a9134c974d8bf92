"""The public surface, pinned: verbs and their flags. A new flag is a decision, so it edits this file."""

import argparse

from palimpsest.cli.main import VERBS, build_parser

FLAGS = {
    "plan": {
        "model",
        "--context",
        "--rows",
        "--ranks",
        "--page",
        "--layer",
        "--reuse",
        "--index-format",
        "--latent-format",
        "--activation",
        "--weights",
        "--granularity",
        "--compare",
        "--device-memory",
        "--free-memory",
        "--scope",
        "--output",
        "--html",
        "--svg",
        "--png",
        "--json",
    },
    "fit": {
        "model",
        "--memory",
        "--context",
        "--rows",
        "--ranks",
        "--page",
        "--layer",
        "--index-format",
        "--latent-format",
        "--weights",
        "--drafter",
        "--granularity",
        "--reserve",
        "--json",
    },
    "explain": {"model", "--context", "--rows", "--ranks", "--page", "--layer", "--json"},
    "checkpoint": {"action"},
    "preflight": {"directory", "--json"},
    "qualify": {
        "model",
        "--layer",
        "--ranks",
        "--profile",
        "--seed",
        "--engine",
        "--kernel",
        "--evidence",
        "--self-test",
        "--self-test-record",
        "--digest",
        "--trust",
        "--against",
        "--html",
        "--json",
    },
    "verify": {"folder", "--json"},
    "report": {"folder", "--html"},
    "prepare": {
        "checkpoint",
        "--output",
        "--layer",
        "--ranks",
        "--context",
        "--rows",
        "--page",
        "--jobs",
        "--isa",
        "--engine",
        "--store",
        "--timeout",
        "--json",
    },
}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {(a.option_strings[-1] if a.option_strings else a.dest) for a in parser._actions if a.dest != "help"}


def test_verbs_and_flags_are_pinned() -> None:
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert list(verbs.choices) == list(VERBS) == list(FLAGS)
    assert {name: flags_of(parser) for name, parser in verbs.choices.items()} == FLAGS


def test_every_verb_has_help() -> None:
    (verbs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert all(parser.description for parser in verbs.choices.values())

"""The plan file: a program and its plan in one JSON text, so that a reader needs nothing else to check it."""

import json
from typing import Any

from palimpsest.core.canon import canonical, plain
from palimpsest.core.spec import Program
from palimpsest.plan.plan import Plan

#: names the JSON form; ``palimpsest verify`` refuses any other
FILE_FORMAT = "palimpsest-plan-file-1"


def plan_tree(program: Program, plan: Plan) -> dict[str, Any]:
    """The file as dicts, lists, strings and whole numbers. ``plan`` must be a plan of ``program``."""
    return {"format": FILE_FORMAT, "program": plain(program), "plan": json.loads(plan.to_json())}


def plan_text(program: Program, plan: Plan) -> str:
    """The file's text: canonical JSON and a newline."""
    return canonical(plan_tree(program, plan)) + "\n"

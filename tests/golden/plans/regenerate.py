"""Rewrite the golden plans after a deliberate change of recipe or placer: ``python tests/golden/plans/regenerate.py``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "plan"), str(HERE.parent.parent.parent)]

from plan_cases import k31_program  # noqa: E402

from palimpsest.plan.check import check  # noqa: E402
from palimpsest.plan.place import place  # noqa: E402

for reuse in ("on", "off"):
    made = k31_program()
    plan = place(made, reuse)
    check(made, plan)
    target = HERE / f"kimi-k3.1-pro.layer3.1M.4096.16.{reuse}.json"
    target.write_text(plan.to_json() + "\n", "utf-8")
    print(f"{plan.digest}  {target.name}")

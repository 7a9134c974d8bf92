#!/usr/bin/env bash
# Ship a core: prepare a tiny layer, copy the folder away, and run it where `palimpsest` is not installed.
#
#   bash examples/ship_a_core.sh [WORK]
#
# Needs a C++ compiler for the first part. The second part runs with torch and the one package `palimpsest_loader` only.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="${1:-$(mktemp -d)}"
python="${PYTHON:-python3}"
mkdir -p "$work/elsewhere/packages"

echo "== prepare (compiles 12 programs; minutes the first time)"
"$python" -m palimpsest.cli.main checkpoint make tiny-k31 "$work/model"
"$python" -m palimpsest.cli.main prepare "$work/model" -o "$work/core" --context 512 --rows 64 --store "$work/store" | tee "$work/prepared.txt"
digest="$(awk '$1 == "digest" { print $2 }' "$work/prepared.txt")"

echo "== copy the core and the loader elsewhere"
cp -r "$work/core" "$work/elsewhere/core"
cp -r "$here/palimpsest_loader" "$work/elsewhere/packages/palimpsest_loader"
cd "$work/elsewhere"

echo "== run it there: palimpsest itself is blocked"
run() { PYTHONPATH="$work/elsewhere/packages" "$python" -P "$@"; }
run - <<'CHECK'
import sys
sys.meta_path.insert(0, type("NoModelCode", (), {"find_spec": staticmethod(lambda name, *_: (_ for _ in ()).throw(ImportError(name)) if name.split(".")[0] == "palimpsest" else None)}))
import palimpsest_loader
print("loader from", palimpsest_loader.__file__)
try:
    import palimpsest
except ImportError as error:
    print("no", error)
else:
    sys.exit("palimpsest is importable here")
CHECK
run -m palimpsest_loader run core --digest "$digest" --chunks 64,64,17,1
echo "== a changed byte is refused by name"
file="$(ls core/programs | head -1)"
printf 'x' | dd of="core/programs/$file" bs=1 seek=100 conv=notrunc status=none
if run -m palimpsest_loader run core --digest "$digest"; then echo "it was accepted"; exit 1; fi

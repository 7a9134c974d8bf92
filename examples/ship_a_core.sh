#!/usr/bin/env bash
# Ship a core: prepare a tiny layer, qualify it, copy the folder away, and run it in an environment without `palimpsest`.
#
#   bash examples/ship_a_core.sh [WORK]
#
# Needs a C++ compiler for the first part. The second part runs in a virtual environment that has torch and the one package
# `palimpsest_loader` only. Fails when the core is not right, when its replay elsewhere gives other bytes than here, or when a
# changed byte is accepted. Without WORK everything is made in a temporary folder and removed at the end.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    work="$(cd "$1" && pwd)"
else
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
fi
python="${PYTHON:-python3}"
chunks=64,64,17,1

echo "== prepare (compiles 12 programs; minutes the first time)"
"$python" -m palimpsest.cli.main checkpoint make tiny-k31 "$work/model"
"$python" -m palimpsest.cli.main prepare "$work/model" -o "$work/core" --context 512 --rows 64 --store "$work/store" --jobs 2 | tee "$work/prepared.txt"
digest="$(awk '$1 == "digest" { print $2 }' "$work/prepared.txt")"

echo "== qualify it against its checkpoint, and run it here"
if ! "$python" -m palimpsest.cli.main qualify "$work/core" --digest "$digest" --against "$work/model" 2>"$work/qualify.txt"; then
    tail -3 "$work/qualify.txt"
    exit 1
fi
"$python" -m palimpsest_loader run "$work/core" --digest "$digest" --chunks "$chunks" | tee "$work/here.txt"

echo "== copy the core and the loader elsewhere"
elsewhere="$work/elsewhere"
"$python" -m venv --without-pip "$elsewhere/venv"
packages="$(echo "$elsewhere"/venv/lib/python*/site-packages)"
"$python" - "$packages" <<'LINK' # what is installed beside torch, but nothing of this project
import importlib.util, pathlib, sys
for path in pathlib.Path(importlib.util.find_spec("torch").origin).parents[1].iterdir():
    if "palimpsest" not in path.name and path.suffix != ".pth":
        (pathlib.Path(sys.argv[1]) / path.name).symlink_to(path)
LINK
cp -r "$here/palimpsest_loader" "$packages/palimpsest_loader"
cp -r "$work/core" "$elsewhere/core"
cd "$elsewhere"
run() { "$elsewhere/venv/bin/python" -I "$@"; }

echo "== run it there: palimpsest is not installed"
if run -c "import palimpsest" 2>"$work/import.txt"; then
    echo "palimpsest is installed in $elsewhere/venv"
    exit 1
fi
tail -1 "$work/import.txt"
run -m palimpsest_loader run core --digest "$digest" --chunks "$chunks" | tee "$work/there.txt"
if ! cmp <(grep ^output "$work/here.txt") <(grep ^output "$work/there.txt"); then
    echo "the replay elsewhere gives other bytes than here"
    exit 1
fi

echo "== a changed byte is refused by name"
file="$(ls core/programs | head -1)"
printf 'x' | dd of="core/programs/$file" bs=1 seek=100 conv=notrunc status=none
if run -m palimpsest_loader run core --digest "$digest"; then
    echo "it was accepted"
    exit 1
fi
echo "== shipped"

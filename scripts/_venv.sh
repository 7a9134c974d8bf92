# Sourced by the other scripts: makes ./.venv once per set of requirements and puts it on PATH.
# PALIMPSEST_VENV names another folder for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${PALIMPSEST_VENV:-.venv}"

ensure_venv() { # ensure_venv EXTRAS, e.g. "" or "[test]"
    local stamp wanted
    stamp="$venv/.requirements"
    wanted="$1 $(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
        echo "installing palimpsest$1 into $venv (torch is the large part)" >&2
        [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$1" >&2
        echo "$wanted" >"$stamp"
    fi
    PATH="$(cd "$venv" && pwd)/bin:$PATH"
    export PATH
}

#!/usr/bin/env bash
# The integration tests with several versions of Python and torch, and what came of it as a table.
#
#   tests/versions.sh                                  every pair below whose interpreter is found
#   tests/versions.sh 3.12:2.13.0 3.11:2.6.0           these pairs
#   TESTS="tests/integration/test_record.py" tests/versions.sh     these tests alone
#
# Every pair gets an environment in $VERSIONS_DIR (default .versions), which stays for the next time. Where wheels for
# the CPU alone can be had, PIP_EXTRA_INDEX_URL says so: https://download.pytorch.org/whl/cpu saves gigabytes.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD # this tree, whichever one the environment was made for
where=${VERSIONS_DIR:-.versions}
pairs=("$@")
[ ${#pairs[@]} -gt 0 ] || pairs=(3.11:2.6.0 3.11:2.8.0 3.11:2.11.0 3.10:2.13.0 3.11:2.13.0 3.12:2.13.0 3.13:2.13.0 3.11:newest)
read -r -a tests <<< "${TESTS:-tests/integration}"

interpreter() { # of a version such as 3.12: on the path, or one of pyenv's
    command -v "python$1" 2> /dev/null && "python$1" -c '' 2> /dev/null && return
    for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        [ -x "$found" ] && echo "$found" && return
    done
}

rows=()
for pair in "${pairs[@]}"; do
    python=${pair%%:*} torch=${pair#*:}
    found=$(interpreter "$python" | tail -1)
    if [ -z "$found" ]; then
        rows+=("$python|$torch|no interpreter|")
        continue
    fi
    place=$where/$python-$torch
    log=$where/$python-$torch.log
    mkdir -p "$where"
    wanted=torch==$torch
    [ "$torch" = newest ] && wanted=torch
    if ! { [ -x "$place/bin/pytest" ] || { "$found" -m venv "$place" &&
        "$place/bin/python" -m pip install --quiet --upgrade "$wanted" && "$place/bin/python" -m pip install --quiet -e ".[dev]" "$wanted"; }; } > "$log" 2>&1; then
        rows+=("$python|$torch|cannot be installed|$(tail -1 "$log" | cut -c1-80)")
        continue
    fi
    "$place/bin/python" -m pytest -q -n "${WORKERS:-2}" -p no:cacheprovider "${tests[@]}" >> "$log" 2>&1
    rows+=("$("$place/bin/python" -c 'import platform, torch; print(platform.python_version(), torch.__version__, sep="|")')|$(
        grep -E '[0-9]+ (passed|failed)' "$log" | tail -1 | tr -d '=' | sed 's/ in .*//; s/^ *//')|$log")
done

printf '\n%-10s %-14s %-42s %s\n' Python torch "tests" "log"
for row in "${rows[@]}"; do
    IFS='|' read -r python torch result log <<< "$row"
    printf '%-10s %-14s %-42s %s\n' "$python" "$torch" "$result" "$log"
done
for row in "${rows[@]}"; do
    case $row in *failed* | *"cannot be installed"* | *error*) exit 1 ;; esac
done

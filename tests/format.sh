#!/usr/bin/env bash
# Formats every C++ and CUDA file in place with the project's .clang-format, or checks it.
#
#   tests/format.sh [--check]
#
# --check changes nothing, names each file that would change and exits 1 if there is one.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=(-i)
case "${1:-}" in
  "") ;;
  --check) mode=(--dry-run -Werror) ;;
  *) echo "format: unknown flag '$1' (only --check)" >&2; exit 2 ;;
esac

folders=(proto kernels client calib control_plane cache_node cmd tests)
mapfile -t files < <(find "${folders[@]}" -type f \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) | sort)
bad=0
for file in "${files[@]}"; do
  clang-format --style=file "${mode[@]}" "$file" 2>/dev/null || { echo "$file"; bad=1; }
done
exit $bad

#!/usr/bin/env bash
# Makes programs built here run on another machine of the same architecture: copies them to
# DIR/bin and the shared libraries that they need, other than the C library's, to DIR/lib.
#
#   deploy/bundle.sh DIR PROGRAM...
#
# There: LD_LIBRARY_PATH=DIR/lib DIR/bin/PROGRAM. Its C library must be as new as this one.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: deploy/bundle.sh DIR PROGRAM..." >&2
  exit 2
fi
dir=$1
shift
mkdir -p "$dir/bin" "$dir/lib"
for program in "$@"; do
  if [ ! -x "$program" ]; then
    echo "bundle: error: $program is not a program" >&2
    exit 1
  fi
  cp -f "$program" "$dir/bin/"
  strip "$dir/bin/$(basename "$program")" 2>/dev/null || true
  missing=$(ldd "$program" | awk '/not found/ {print $1}')
  if [ -n "$missing" ]; then
    echo "bundle: error: $program needs $missing, which is not here" >&2
    exit 1
  fi
  ldd "$program" | awk '$2 == "=>" {print $3}' |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|libresolv|libutil|ld-linux[^/]*)\.so' |
    while read -r library; do
      cp -fL "$library" "$dir/lib/"
    done
done
echo "bundle: $(du -sm "$dir" | cut -f1) MiB in $dir" >&2

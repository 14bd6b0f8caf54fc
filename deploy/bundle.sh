#!/usr/bin/env bash
# Makes programs built here run on another machine of the same architecture: copies them to
# DIR/bin and the shared libraries that they need, other than the C library's, to DIR/lib. UCX's
# transports, which it loads from a folder beside itself, go to DIR/lib/ucx. A GPU's libraries
# (libcuda, libnvidia-ml) belong to its driver and come from the machine.
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

c_library='/(libc|libm|libdl|librt|libpthread|libresolv|libutil|ld-linux[^/]*)\.so'
driver='^(libcuda|libnvidia-ml)\.so'

# Where a file is loaded to, and how much of it.
segments_of() { readelf -lW "$1" | awk '$1 == "LOAD" {print $3, $5, $6}'; }
# Strips FILE, unless that loses bytes of it: strip does not understand what patchelf made of the
# libraries in a wheel.
strip_file() {
  strip --strip-unneeded -o "$1.stripped" "$1" 2>/dev/null || true
  if [ -s "$1.stripped" ] && [ "$(segments_of "$1")" = "$(segments_of "$1.stripped")" ]; then
    mv -f "$1.stripped" "$1"
  fi
  rm -f "$1.stripped"
}
# What FILE needs and is not here.
missing_of() { ldd "$1" | awk '/not found/ {print $1}' | { grep -Ev "$driver" || true; }; }
# Copies what FILE needs.
copy_libraries() {
  ldd "$1" | awk '$2 == "=>" && $3 ~ "^/" {print $3}' | { grep -Ev "$c_library" || true; } |
    while read -r library; do
      name=$(basename "$library")
      if [[ $name =~ $driver || -e $dir/lib/$name ]]; then continue; fi
      cp -L "$library" "$dir/lib/"
      strip_file "$dir/lib/$name"
    done
}

rm -f "$dir"/lib/*.so*  # Those of an earlier build have the same names.
rm -rf "$dir/lib/ucx"
for program in "$@"; do
  if [ ! -x "$program" ]; then
    echo "bundle: error: $program is not a program" >&2
    exit 1
  fi
  cp -f "$program" "$dir/bin/"
  strip_file "$dir/bin/$(basename "$program")"
  missing=$(missing_of "$program")
  if [ -n "$missing" ]; then
    echo "bundle: error: $program needs $missing, which is not here" >&2
    exit 1
  fi
  copy_libraries "$program"
done

ucs=$(for program in "$@"; do ldd "$program"; done | awk '$1 ~ /^libucs\.so/ && !seen++ {print $3}')
if [ -n "$ucs" ] && [ -d "$(dirname "$ucs")/ucx" ]; then
  mkdir -p "$dir/lib/ucx"
  # By the name that UCX loads; the perftest's helpers are not transports.
  for module in "$(dirname "$ucs")"/ucx/lib*.so.0; do
    name=$(basename "$module")
    if [[ $name == libucx_perftest* ]]; then continue; fi
    missing=$(LD_LIBRARY_PATH="$(dirname "$ucs")" missing_of "$module")
    if [ -n "$missing" ]; then
      echo "bundle: left out $name, which needs $missing" >&2
      continue
    fi
    cp -L "$module" "$dir/lib/ucx/"
    strip_file "$dir/lib/ucx/$name"
    LD_LIBRARY_PATH="$(dirname "$ucs")" copy_libraries "$module"
  done
fi
echo "bundle: $(du -sm "$dir" | cut -f1) MiB in $dir" >&2

#!/usr/bin/env bash
# Puts a UCX that knows CUDA memory (cuda_copy, cuda_ipc) at build/ucx, where the build with the GPU
# parts finds it. It is the PyPI package libucx-cu13, which is downloaded and unpacked, never
# installed or imported. It has no RDMA: an operator's UCX with both is used instead with
# -Ducx_ROOT=PREFIX. Idempotent.
#
#   deploy/fetch_ucx.sh [--help]
#
# Exits 1, naming the package, when it cannot be had or is not the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."

# Not 1.22.0: see SafeWithDevices in client/transport/ucx_paths.h.
package=libucx-cu13==1.21.0
# Of the wheels for the machines that it exists for.
declare -A sha256=(
  [x86_64]=fc25d345a516e33c21b8229f678b6e06e97a52394ddcde77b770a3bdebd787b5
  [aarch64]=9206cae5d40d1838459cd0a298e36eb5fe91c0b93a9960438398d2312a5bf192
)
target=build/ucx

. deploy/wheel.sh

case "${1:-}" in
  '') ;;
  --help) sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
  *) echo "fetch_ucx: unknown flag '$1' (see --help)" >&2; exit 2 ;;
esac

if [ "$(cat "$target/package" 2>/dev/null)" = "$package" ]; then
  say "$package is in place: $target"
  exit 0
fi
[ -n "${sha256[$(uname -m)]:-}" ] || die "package $package is not pinned for $(uname -m)"

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
download_wheel "$package" 30 "$temp"
[ "$(sha256sum "$wheel" | cut -c1-64)" = "${sha256[$(uname -m)]}" ] ||
  die "package $package is not the pinned one (SHA-256 ${sha256[$(uname -m)]})"
unzip -q "$wheel" 'libucx/*' 'libucx_cu13.libs/*' -x '*.a' '*.la' '*.py' -d "$temp" ||
  die "package $package cannot be unpacked"
[ -e "$temp/libucx/lib/ucx/libuct_cuda.so.0" ] || die "package $package holds no CUDA transports"
chmod +x "$temp"/libucx/bin/*
# A wheel has no links: three copies of each library otherwise.
find "$temp/libucx/lib" -name '*.so.0.0.0' | while read -r library; do
  name=$(basename "$library" .0.0.0)
  ln -sf "$name.0.0.0" "${library%.0.0.0}.0"
  ln -sf "$name.0.0.0" "${library%.0.0.0}"
done
echo "$package" >"$temp/libucx/package"  # Last: what has it is complete.
mkdir -p build
rm -rf "$target" build/libucx_cu13.libs
mv "$temp/libucx_cu13.libs" build/  # Beside it: where its modules look for their CUDA runtime.
mv "$temp/libucx" "$target"
say "UCX with CUDA is in place: $target"

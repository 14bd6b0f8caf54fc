#!/usr/bin/env bash
# The service on one GPU, or two, end to end: a worker quantizes 102,400 tokens of a 36-layer model,
# puts the blocks into a node's HBM tier, forgets them, fetches, verifies and attends to them;
# fetches by block size and blocks in flight; and the same blocks copied between two processes by
# the CUDA runtime alone. Runs from a bundle (deploy/bundle.sh of okv-bench, okv-control and
# okv-node, built with CUDA and a UCX that has it) or a build directory; at most --limit seconds
# (default 225).
#
#   tests/bench/gpu_service.sh DIR [--json OUT] [--only PART,...] [--memory device|host]
#                              [--tokens N] [--layers N] [--sizes LAYERS,...] [--rounds N]
#                              [--tls UCX_TLS] [--worker_gpu N] [--node_gpu N]
#                              [--limit SECONDS]
#
# Parts: ipc service sizes paths. OUT gets each part's table, JSON object and progress, the ends of
# the programs' logs, and the node's metrics. A part that fails leaves what it measured before; the
# exit code is then 1. `--memory host` needs no GPU: the service's own flow, without ipc.
set -euo pipefail
dir=${1:?tests/bench/gpu_service.sh needs the folder of bin/}
shift
only=ipc,service,sizes,paths
out=
memory=device
tokens=102400
layers=36
sizes=7,2
rounds=9
tls=
limit_s=225
gpus=(--worker_gpu 0 --node_gpu 0)
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || { echo "gpu_service.sh: error: $1 needs a value" >&2; exit 2; }
  case $1 in
    --json) out=$2 ;;
    --only) only=$2 ;;
    --memory) memory=$2 ;;
    --tokens) tokens=$2 ;;
    --layers) layers=$2 ;;
    --sizes) sizes=$2 ;;
    --rounds) rounds=$2 ;;
    --tls) tls=$2 ;;
    --worker_gpu) gpus[1]=$2 ;;
    --node_gpu) gpus[3]=$2 ;;
    --limit) limit_s=$2 ;;
    *) echo "gpu_service.sh: error: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
for part in ${only//,/ }; do
  [[ ,ipc,service,sizes,paths, == *",$part,"* ]] ||
    { echo "gpu_service.sh: error: no part '$part'" >&2; exit 2; }
done
[ -n "${only//,/}" ] || { echo "gpu_service.sh: error: --only names no part" >&2; exit 2; }
[ -x "$dir/bin/okv-bench" ] || { echo "gpu_service.sh: error: no $dir/bin/okv-bench" >&2; exit 2; }
temp=
if [ -z "$out" ]; then
  temp=$(mktemp -d)
  out=$temp
  trap 'rm -rf "$temp"' EXIT
fi
mkdir -p "$out"
failed=0
deadline=$((SECONDS + limit_s))

has() { [[ ",$only," == *",$1,"* ]]; }
# bench NAME LIMIT_S ARGUMENT...: the table to stdout, all of it to OUT/NAME.*. What was measured
# before a failure or the limit is in OUT/NAME.log, whose end is shown then.
bench() {
  local name=$1 limit=$2 begin=$SECONDS code=0 left
  shift 2
  left=$((deadline - SECONDS))
  if [ $left -lt 10 ]; then
    echo "# $name left out: no time"
    failed=1
    return
  fi
  if [ "$limit" -gt $left ]; then limit=$left; fi
  LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    timeout --kill-after=5 "$limit" "$dir/bin/okv-bench" "$@" --json \
    >"$out/$name.txt" 2>"$out/$name.log" || code=$?
  echo "# $name, $((SECONDS - begin)) s: okv-bench $*"
  if [[ $(tail -n 1 "$out/$name.txt") == '{'* ]]; then
    tail -n 1 "$out/$name.txt" >"$out/$name.json"
    sed -i '$d' "$out/$name.txt"
  elif [ $code -eq 0 ]; then
    echo "# $name ended well, without a JSON object as its last line"
    failed=1
  fi
  cat "$out/$name.txt"
  if [ $code -ne 0 ]; then
    failed=1
    echo "# $name FAILED with code $code (124: longer than $limit s); the end of its progress:"
    tail -n 20 "$out/$name.log"
    # Only the whole text of a program that did not start is in there.
    for log in "$out/$name.programs/"*.log; do
      [ -s "$log" ] || continue
      echo "# the end of $log:"
      tail -n 10 "$log"
    done
  fi
}
# service NAME LIMIT_S LAYERS ARGUMENT...
service() {
  local name=$1 limit=$2 count=$3
  shift 3
  bench "$name" "$limit" service --memory "$memory" --layers "$count" --service_tls "$tls" \
    --log_dir "$out/$name.programs" "${gpus[@]}" "$@"
}

if [ "$memory" = device ]; then
  timeout 20 nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || echo "# nvidia-smi failed"
  if has ipc; then
    bench ipc 40 ipc --layers "$layers" --ipc_blocks $((tokens / 64)) --rounds "$rounds" \
      "${gpus[@]}"
  fi
fi
if has service; then
  service service 100 "$layers" --service_tokens "$tokens" --rounds "$rounds"
fi
if has sizes; then
  for count in ${sizes//,/ }; do
    service "service_layers$count" 45 "$count" --service_tokens "$tokens" --rounds "$rounds"
  done
fi
# Which ways UCX takes, in its own words: a run of its own, since they cost time.
if has paths; then
  export UCX_PROTO_INFO=y UCX_LOG_LEVEL=info UCX_LOG_FILE="$out/paths.ucx.%p.log"
  service paths 30 "$layers" --service_tokens 4096 --rounds 1 --in_flight 0
fi
exit $failed

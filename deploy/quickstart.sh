#!/usr/bin/env bash
# OscarKV in one command, on one machine without a GPU: installs, builds, fetches a real model,
# calibrates rotations on its activations, starts a control plane and two cache nodes, lets worker A
# store the prefix of a prompt and worker B, another process, continue from it, and measures what
# INT2 history costs in quality. Stops everything it started.
#
#   deploy/quickstart.sh [--nll_tokens N] [--fresh] [--json] [--help]
#
#   --nll_tokens N  held-out tokens for the quality figures (default 4096)
#   --fresh         calibrate again even if a calibration of this model is there
#   --json          only the JSON line on standard output (progress goes to standard error)
#
# The last line is one JSON object. Exits 0 only when the figures hold: worker B resumed exactly.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

nll_tokens=4096 fresh=0 json_only=0
while [ $# -gt 0 ]; do
  case "$1" in
    --nll_tokens) nll_tokens=${2:?--nll_tokens needs a number}; shift ;;
    --fresh) fresh=1 ;;
    --json) json_only=1 ;;
    --help) sed -n '2,14p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "quickstart: unknown flag '$1' (see --help)" >&2; exit 2 ;;
  esac
  shift
done
if ! [[ $nll_tokens =~ ^[0-9]{1,6}$ ]] || [ $((10#$nll_tokens % 2048)) -ne 0 ] || \
    [ $((10#$nll_tokens)) -eq 0 ]; then
  echo "quickstart: --nll_tokens '$nll_tokens' is not a positive multiple of 2048" >&2
  exit 2
fi

exec 3>&1                                  # The table and the JSON line.
[ "$json_only" = 1 ] && exec 3>/dev/null
step() { printf '\n== %s\n' "$*" >&2; }
die() { printf 'quickstart: error: %s\n' "$*" >&2; exit 1; }

bin=$root/build/release/bin
work=$root/build/quickstart
model=$root/build/models/SmolLM2-135M-Instruct.Q4_1.gguf
text=$root/build/text/jargon.txt
# Part of the calibration's name: another recipe makes a new one.
calibration_tokens=49152
calibration_skip=65536  # The calibration sees nothing in front of it: not the prompt, ...
recipe="4: $calibration_tokens tokens behind $calibration_skip, window 2048, group_size 64"
nll_skip_tokens=16384  # ... and not the held-out text, which begins here.

pids=()
stop_all() {
  local status=$?
  trap - EXIT
  for pid in "${pids[@]:-}"; do
    if [ -n "$pid" ]; then kill -TERM "$pid" 2>/dev/null || true; fi
  done
  for _ in $(seq 300); do  # A node may spill for 20 s.
    [ -z "$(jobs -rp)" ] && break
    sleep 0.1
  done
  for pid in $(jobs -rp); do kill -KILL "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  [ $status -eq 0 ] || printf 'quickstart: failed; logs are in %s\n' "$work/logs" >&2
  exit $status
}
trap stop_all EXIT
trap 'exit 130' INT TERM

# run COMMAND...: bash answers a signal only between commands, and while it waits: so it waits. Its
# status is the command's, also where the caller asks for it and `set -e` is therefore off.
run() {
  local status=0
  "$@" &
  pids+=($!)
  wait $! || status=$?
  unset 'pids[-1]'
  return $status
}

step "1/8 dependencies and model"
run deploy/bootstrap.sh >&2
run deploy/fetch_text.sh >&2

step "2/8 build (release)"
run cmake --workflow --preset release >&2

step "3/8 calibration on real activations"
mkdir -p "$work/logs"
name=$( (sha256sum <"$model"; sha256sum <"$text"; echo "$recipe") | sha256sum | cut -c1-12)
calibration=$work/calibration-$name
if [ "$fresh" = 1 ]; then rm -rf "$calibration"; fi
if [ -e "$calibration/done" ]; then
  echo "calibration is in place: $calibration" >&2
else
  rm -rf "$calibration" && mkdir -p "$calibration"
  run "$bin/okv-worker" dump --model "$model" --text "$text" --tokens $calibration_tokens \
    --skip_tokens $calibration_skip --window 2048 --out "$calibration/dump" >&2
  for method in oscar hadamard none; do
    run "$bin/okv-calibrate" fit --dump "$calibration/dump" --method "$method" --group_size 64 \
      --out "$calibration/$method.safetensors" >&2
  done
  rm -rf "$calibration/dump"
  touch "$calibration/done"
fi

step "4/8 control plane and two nodes"
run_dir=$work/run
rm -rf "$run_dir" && mkdir -p "$run_dir"
wait_for() {  # wait_for FILE PID NAME
  for _ in $(seq 300); do
    [ -s "$1" ] && return 0
    kill -0 "$2" 2>/dev/null || { tail -n 5 "$work/logs/$3.log" >&2; die "$3 stopped"; }
    sleep 0.1
  done
  die "$3 is not ready after 30 s; see $work/logs/$3.log"
}
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$@"; }
"$bin/okv-control" --listen 127.0.0.1:0 --data_dir "$run_dir/control" \
  --port_file "$run_dir/control.port" >"$work/logs/okv-control.log" 2>&1 &
pids+=($!)
wait_for "$run_dir/control.port" $! okv-control
control=127.0.0.1:$(cat "$run_dir/control.port")
published=$("$bin/okvctl" --control "$control" publish "$calibration/oscar.safetensors")
echo "$published" >&2
rotation=${published##* }  # Workers A and B get the set from the control plane, by its hash.
for node in 1 2; do
  "$bin/okv-node" --control "$control" --data_dir "$run_dir/node$node" --dram_bytes $((96 << 20)) \
    --disk_bytes $((1 << 30)) --ready_file "$run_dir/node$node.json" \
    >"$work/logs/okv-node$node.log" 2>&1 &
  pids+=($!)
  wait_for "$run_dir/node$node.json" $! "okv-node$node"
  echo "okv-node$node: data $(field "$run_dir/node$node.json" data_address)," \
    "metrics http://$(field "$run_dir/node$node.json" metrics_address)/metrics" >&2
done
echo "okv-control: $control" >&2

# worker NAME FLAGS...: one okv-worker; its JSON line goes to $run_dir/worker-NAME.json.
worker() {
  local name=$1
  shift
  run "$bin/okv-worker" run --model "$model" --prompt_file "$text" --prompt_tokens 4110 \
    --max_new_tokens 32 --json "$@" \
    >"$work/logs/worker-$name.log" || die "worker $name failed"
  head -n -1 "$work/logs/worker-$name.log" >&2
  tail -n 1 "$work/logs/worker-$name.log" >"$run_dir/worker-$name.json"
}
ending_a=$'\n\nIn one sentence, the text above is about'
ending_b=$'\n\nThe most surprising thing in this text is that'

step "5/8 worker A: cold prefill, its blocks go to the nodes"
worker a --control "$control" --rotation "$rotation" --ending "$ending_a" --store
failure=$(python3 -c 'import json, sys
print(next(iter(json.load(open(sys.argv[1]))["store_failures"]), ""))' "$run_dir/worker-a.json")
[ -z "$failure" ] || die "worker A could not store its blocks: $failure"
for node in 1 2; do
  curl -sS --noproxy "*" --max-time 5 "http://$(field "$run_dir/node$node.json" metrics_address)/metrics" \
    >"$run_dir/node$node.metrics" || die "node $node has no metrics"
done

step "6/8 worker B: the same prefix, another ending, another process"
worker b --control "$control" --rotation "$rotation" --ending "$ending_b"

step "7/8 worker B's prompt again, without network and without a hit"
worker alone --rotation "$calibration/oscar.safetensors" --ending "$ending_b"

step "8/8 quality: NLL of held-out text with BF16 KV and with INT2 history"
rotations=oscar=$calibration/oscar.safetensors
rotations+=,hadamard=$calibration/hadamard.safetensors,none=$calibration/none.safetensors
run "$bin/okv-bench" nll --model "$model" --text "$text" --skip_tokens $nll_skip_tokens \
  --tokens "$nll_tokens" --window 2048 --rotations "$rotations" --json \
  >"$work/logs/nll.log" || die "okv-bench nll failed"
head -n -1 "$work/logs/nll.log" >&2
tail -n 1 "$work/logs/nll.log" >"$run_dir/nll.json"

status=0
python3 deploy/quickstart_report.py "$run_dir" >"$run_dir/report.txt" || status=$?
head -n -1 "$run_dir/report.txt" >&3
tail -n 1 "$run_dir/report.txt"
exit $status

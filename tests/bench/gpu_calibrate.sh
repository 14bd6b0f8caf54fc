#!/usr/bin/env bash
# Measures calibration on GPUs: draws a dump of random rows, fits it on the CPU, on one GPU and on
# two, and compares time, memory and the rotation sets.
#
#   tests/bench/gpu_calibrate.sh PROGRAM [--layers N] [--tokens N] [--folder DIR] [--help]
#
# PROGRAM is okv-calibrate, built with CUDA and NCCL. 36 layers of 30,000 tokens (the default; 32
# query and 8 KV heads of 128 channels) are 13 GB of disk below --folder, removed at the end. The
# recipe is the published one: the covariances are all the work. Exits 1 when sets differ in more
# than one bf16 number of 1,000. Without a second GPU that part is left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

program='' layers=36 tokens=30000 folder=${TMPDIR:-/tmp}
while [ $# -gt 0 ]; do
  case "$1" in
    --layers) layers=$2; shift 2 ;;
    --tokens) tokens=$2; shift 2 ;;
    --folder) folder=$2; shift 2 ;;
    --help) sed -n '2,13p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "gpu_calibrate: unknown flag '$1' (see --help)" >&2; exit 2 ;;
    *) program=$1; shift ;;
  esac
done
[ -x "$program" ] || { echo "gpu_calibrate: say the program (see --help)" >&2; exit 2; }

work=$(mktemp -d "$folder/okv_calibrate_XXXXXX")
trap 'rm -rf "$work"' EXIT

begin=$SECONDS
"$program" draw --layers "$layers" --tokens "$tokens" --out "$work/dump"
echo "drawn: $(du -sh "$work/dump" | cut -f1) in $((SECONDS - begin)) s"

# fit NAME FLAGS...: one line of what it took.
fit() {
  local name=$1
  shift
  python3 "$here/measure_run.py" "$work/$name.json" "$program" fit --recipe published \
    --measure_tokens 0 --dump "$work/dump" --out "$work/$name" --json "$@"
  echo "$name: $(cat "$work/$name.json")"
}

gpus=$(nvidia-smi --list-gpus | wc -l)
fit cpu
fit gpu1 --nccl --ranks 1
sets=(cpu gpu1)
if [ "$gpus" -ge 2 ]; then
  fit gpu2 --nccl --ranks 2
  sets+=(gpu2)
else
  echo "gpu2: left out, there is one GPU"
fi
for set in "${sets[@]:1}"; do
  python3 "$here/compare_sets.py" "$work/${sets[0]}" "$work/$set"
done
if [ "$gpus" -ge 2 ]; then python3 "$here/compare_sets.py" "$work/gpu1" "$work/gpu2"; fi

#!/usr/bin/env bash
# Measures calibration on GPUs: draws a dump of random rows, fits it on the CPU, on one GPU and on
# two, and compares time, memory and the rotation sets.
#
#   tests/bench/gpu_calibrate.sh PROGRAM [--layers N] [--tokens N] [--fits FIT,...]
#                                [--folder DIR] [--help]
#
# PROGRAM is okv-calibrate, built with CUDA and NCCL. 36 layers of 30,000 tokens (the default; 32
# query and 8 KV heads of 128 channels) are 13 GB of disk below --folder, removed at the end. The
# recipe is the published one: the covariances are all the work. Exits 1 when sets differ in more
# than one bf16 number of 1,000. Fits: cpu gpu1 gpu2 (default: all; without a second GPU gpu2 is
# left out). 36 layers take one GPU and 32 cores 13 s.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

program='' layers=36 tokens=30000 fits=cpu,gpu1,gpu2 folder=${TMPDIR:-/tmp}
while [ $# -gt 0 ]; do
  case "$1" in
    --layers) layers=$2; shift 2 ;;
    --tokens) tokens=$2; shift 2 ;;
    --fits) fits=$2; shift 2 ;;
    --folder) folder=$2; shift 2 ;;
    --help) sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "gpu_calibrate: unknown flag '$1' (see --help)" >&2; exit 2 ;;
    *) program=$1; shift ;;
  esac
done
for name in ${fits//,/ }; do
  [[ ,cpu,gpu1,gpu2, == *",$name,"* ]] ||
    { echo "gpu_calibrate: no fit '$name' (see --help)" >&2; exit 2; }
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

gpus=$(timeout 20 nvidia-smi --list-gpus | wc -l)
sets=()
for name in ${fits//,/ }; do
  case $name in
    cpu) fit cpu ;;
    gpu1) fit gpu1 --nccl --ranks 1 ;;
    gpu2)
      if [ "$gpus" -lt 2 ]; then
        echo "gpu2: left out, there is one GPU"
        continue
      fi
      fit gpu2 --nccl --ranks 2
      ;;
  esac
  sets+=("$name")
done
for ((i = 1; i < ${#sets[@]}; ++i)); do
  for ((j = 0; j < i; ++j)); do
    echo "${sets[j]} and ${sets[i]}:"
    python3 "$here/compare_sets.py" "$work/${sets[j]}" "$work/${sets[i]}"
  done
done

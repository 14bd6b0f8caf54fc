#!/usr/bin/env bash
# Everything that is measured on one GPU: correctness first, then times by shape beside the copy
# rate and a kernel that only loads, then what others reach on the same machine. Runs from a bundle
# (deploy/bundle.sh) or a build directory; about 2 minutes.
#
#   tests/bench/gpu.sh DIR [--only PART,...] [--json OUT] [--covariances K_FILE,V_FILE]
#                          [OPTION of attend_peers.py]...
#
# DIR/bin has okv-bench and okv_kernels_cuda_test. Parts: test attend peers heads drawn codec
# prefill shapes. OUT gets a JSON file a command; `plot_attend.py OUT kernels/plots` draws them.
# `drawn` needs published rotation files of d 128. attend_peers.py says how to get
# --flashinfer_library (or --flashinfer_include) and --oscar_kernel.
set -euo pipefail
dir=${1:?tests/bench/gpu.sh needs the folder of bin/}
shift
here=$(cd "$(dirname "$0")" && pwd)
only=test,attend,peers,heads,drawn,codec,prefill,shapes
out=
covariances=
peers=()
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=$2 ;;
    --json) out=$2 ;;
    --covariances) covariances=$2 ;;
    --flashinfer_library | --flashinfer_include | --oscar_kernel) peers+=("$1" "$2") ;;
    *) echo "gpu.sh: error: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
parts=,test,attend,peers,heads,drawn,codec,prefill,shapes,
for part in ${only//,/ }; do
  [[ $parts == *",$part,"* ]] || { echo "gpu.sh: error: no part '$part'" >&2; exit 2; }
done
[ -n "${only//,/}" ] || { echo "gpu.sh: error: --only names no part" >&2; exit 2; }
[ -z "$out" ] || mkdir -p "$out"
progress=$(mktemp)
trap 'rm -f "$progress"' EXIT
failed=0

has() { [[ ",$only," == *",$1,"* ]]; }
run() { LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$dir/bin/$@"; }
# bench NAME ARGUMENT...: the table to stdout, the JSON object to OUT/NAME.json.
bench() {
  local name=$1 text begin=$SECONDS
  shift
  if ! text=$(run okv-bench "$@" --json 2>"$progress"); then
    echo "$name failed: $text"
    cat "$progress"
    failed=1
    return
  fi
  if [[ $(tail -n 1 <<<"$text") != '{'*'}' ]]; then
    echo "$name failed: its last line is no JSON object: $text"
    failed=1
    return
  fi
  echo "# $name, $((SECONDS - begin)) s"
  sed '$d' <<<"$text"
  [ -z "$out" ] || tail -n 1 <<<"$text" >"$out/$name.json"
}
others() {
  local name=$1 begin=$SECONDS
  shift
  python3 "$here/attend_peers.py" "$@" ${peers[@]+"${peers[@]}"} ${out:+--json "$out/$name.json"} ||
    failed=1
  echo "# $name, $((SECONDS - begin)) s"
}

long=8x102400,32x32768
contexts=1x4096,1x32768,1x102400,1x131072,8x4096,8x32768,8x102400,8x131072
contexts=$contexts,32x4096,32x8192,32x32768,64r4096,256r4096
if has test; then run okv_kernels_cuda_test --gtest_brief=1 || failed=1; fi
if has attend; then
  bench attend attend --shapes $contexts
  bench attend_sigma8 attend --query_sigma 8 --shapes 1x102400,$long
fi
if has peers; then
  others peers --shapes $contexts
  others peers_heads64 --query_heads 64 --shapes 1x102400,$long
fi
if has heads; then
  bench attend_heads64 attend --query_heads 64 --shapes 1x102400,$long
  bench attend_heads64_sigma8 attend --query_heads 64 --query_sigma 8 --shapes $long
fi
if has drawn && [ -n "$covariances" ]; then
  bench attend_drawn attend --covariances "$covariances" --shapes 1x102400,$long
  bench attend_drawn_heads64 attend --covariances "$covariances" --query_heads 64 --shapes $long
fi
if has codec; then
  for command in quantize dequantize verify; do
    bench "$command" $command
    bench "${command}_d64" $command --head_dim 64 --group_size 64
    bench "${command}_d256" $command --head_dim 256 --group_size 256 --layers 18
    [ $command = verify ] || bench "${command}_rotation8" $command --rotation_heads 8
  done
fi
if has prefill; then
  bench prefill prefill
  python3 "$here/prefill_peers.py" >"${out:-/tmp}/prefill_peers.json" || failed=1
fi
if has shapes; then  # At the bytes of 8 x 100K
  d64="--head_dim 64 --shapes 8x204800"
  d256="--head_dim 256 --shapes 8x51200"
  for heads in 8 16 40 56 128; do
    bench "attend_heads$heads" attend --query_heads $heads --shapes 8x102400 --layers 12
  done
  bench attend_heads28_kv4 attend --query_heads 28 --kv_heads 4 --shapes 8x204800 --layers 12
  bench attend_rotation8 attend --rotation_heads 8 --shapes 8x102400 --layers 12
  for group in 64 32; do
    bench "attend_g$group" attend --group_size $group --shapes 8x102400 --layers 12
    bench "attend_d64_g$group" attend $d64 --group_size $group --layers 12
  done
  for group in 256 64; do
    bench "attend_d256_g$group" attend $d256 --group_size $group --layers 12
  done
fi
exit $failed

#!/usr/bin/env bash
# What only two GPUs of one host show: calibration with a rank on each beside one rank; a
# tensor-parallel group with a rank on each; a node on GPU 0 that serves a worker on GPU 1, beside
# plain peer copies; fault rounds with a node on each, one of them killed. Runs from a bundle
# (deploy/bundle.sh) or a build directory with CUDA, NCCL and a UCX that has CUDA.
#
#   tests/bench/gpu_pair.sh DIR [--json OUT] [--only PART,...] [--layers N] [--rounds N] [--help]
#
#   --layers N   of the dump that is calibrated on, 30,000 tokens each (default 12: 4.4 GB of disk)
#   --rounds N   of the faults (default 20)
#
# Parts, and the programs they need in DIR/bin: calibrate (okv-calibrate, okv_calib_cuda_test),
# ranks (okv_cluster_test, okv-control, okv-node, okvctl), nvlink (okv-bench, okv-control,
# okv-node), faults (okv_faults, okv-control, okv-node, okvctl). OUT gets what each printed. Every
# part runs; the exit code is 1 when one failed or there are not two GPUs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
all=calibrate,ranks,nvlink,faults

dir='' out='' only=$all layers=12 rounds=20
while [ $# -gt 0 ]; do
  case "$1" in
    --json) out=${2:?--json needs a folder}; shift 2 ;;
    --only) only=${2:?--only needs parts}; shift 2 ;;
    --layers) layers=${2:?--layers needs a number}; shift 2 ;;
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    --help) sed -n '2,17p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    -*) echo "gpu_pair: unknown flag '$1' (see --help)" >&2; exit 2 ;;
    *) dir=$1; shift ;;
  esac
done
[ -d "$dir/bin" ] || { echo "gpu_pair: say the folder of bin/ (see --help)" >&2; exit 2; }
for part in ${only//,/ }; do
  [[ ",$all," == *",$part,"* ]] || { echo "gpu_pair: no part '$part' (see --help)" >&2; exit 2; }
done
dir=$(cd "$dir" && pwd)
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
[ "$gpus" -ge 2 ] || { echo "gpu_pair: two GPUs are needed, there are $gpus" >&2; exit 1; }

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
[ -n "$out" ] || out=$temp/out
mkdir -p "$out"
export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export NCCL_NVLS_ENABLE=0  # NVLink multicast stays off.
export OKV_BIN_DIR=$dir/bin OKV_SOURCE_DIR=${OKV_SOURCE_DIR:-$(cd "$here/../.." && pwd)}
failed=()

# part NAME COMMAND...: what it prints goes to the screen and to OUT/NAME.txt.
part() {
  local name=$1 begin=$SECONDS status=0
  shift
  echo "# $name: $*"
  "$@" 2>&1 | tee "$out/$name.txt" || status=$?
  [ $status -eq 0 ] || failed+=("$name")
  echo "# $name: exit code $status after $((SECONDS - begin)) s"
}
has() { [[ ",$only," == *",$1,"* ]]; }

nvidia-smi topo -m >"$out/topology.txt" 2>&1 || true
if has ranks; then
  part ranks "$dir/bin/okv_cluster_test" --gtest_filter='*TensorParallel*/Gpu'
fi
if has nvlink; then
  part nvlink "$here/gpu_service.sh" "$dir" --json "$out/nvlink" --only ipc,service \
    --worker_gpu 1 --node_gpu 0
fi
if has faults; then
  part faults "$dir/bin/okv_faults" --scenario=kill_node --rounds="$rounds" --hbm_devices=0,1 --json
fi
if has calibrate; then
  part covariances "$dir/bin/okv_calib_cuda_test"
  part calibrate "$here/gpu_calibrate.sh" "$dir/bin/okv-calibrate" --layers "$layers" \
    --folder "$temp"
fi
[ ${#failed[@]} -eq 0 ] || { echo "gpu_pair: failed: ${failed[*]}" >&2; exit 1; }

#!/usr/bin/env bash
# Decode attention on one GPU: correctness first, then times by shape, then BF16 kernels
# of the same machine. Runs from a bundle (deploy/bundle.sh) or a build directory.
#
#   tests/bench/gpu_attend.sh DIR     (DIR/bin has okv-bench and okv_kernels_cuda_test)
set -euo pipefail
dir=${1:?tests/bench/gpu_attend.sh needs the folder of bin/}
here=$(cd "$(dirname "$0")" && pwd)
run() { LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$dir/bin/$@"; }

run okv_kernels_cuda_test --gtest_brief=1
run okv-bench attend
run okv-bench attend --query_sigma 8 --shapes 1x102400,8x102400,32x32768
run okv-bench attend --query_heads 64 --shapes 1x102400,8x102400,32x32768
run okv-bench attend --query_heads 64 --query_sigma 8 --shapes 8x102400,32x32768
# Other shapes, at the bytes of 8 x 100K.
run okv-bench attend --query_heads 8 --shapes 8x102400 --layers 12
run okv-bench attend --query_heads 40 --shapes 8x102400 --layers 12
run okv-bench attend --query_heads 56 --shapes 8x102400 --layers 12
run okv-bench attend --query_heads 128 --shapes 8x102400 --layers 12
run okv-bench attend --group_size 64 --shapes 8x102400 --layers 12
run okv-bench attend --group_size 32 --shapes 8x102400 --layers 12
run okv-bench attend --head_dim 64 --group_size 64 --shapes 8x204800 --layers 12
run okv-bench attend --head_dim 64 --group_size 32 --shapes 8x204800 --layers 12
run okv-bench attend --head_dim 256 --group_size 256 --shapes 8x51200 --layers 12
run okv-bench attend --head_dim 256 --group_size 64 --shapes 8x51200 --layers 12
python3 "$here/attend_peers.py"

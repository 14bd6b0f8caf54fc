#ifndef OKV_KERNELS_CUDA_PREFILL_MMA_CUH_
#define OKV_KERNELS_CUDA_PREFILL_MMA_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill_plan.cuh"
#include "kernels/cuda/prefill_softmax.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row_tile.cuh"

// Prefill attention with mma.sync, for every architecture: 8 warps, 4 a unit, 16 queries a warp;
// pages by cp.async into rows padded by 16 bytes, the next one while one is computed.
namespace okv::cuda {

template <int kDim>
struct PrefillMmaTile {
  static constexpr int kThreads = 256;
  // d 256 has no room for a second page beside the queries in the 163 KiB of sm_80.
  static constexpr int kStages = kDim == 256 ? 1 : 2;
  static constexpr uint32_t kRowsBytes = SharedRows::Offset<kDim>(64, 0);
  static constexpr uint32_t kStageBytes = 2 * kRowsBytes;                     // K, V
  static constexpr uint32_t kFlags = 2 * kRowsBytes + kStages * kStageBytes;  // A word a unit
  static constexpr uint32_t kSharedBytes = kFlags + 16;
};

template <int kDim>
class PrefillMmaWarp {
 public:
  using Tile = PrefillMmaTile<kDim>;
  static constexpr int kUnits = kDim / 8;

  __device__ PrefillMmaWarp(const PrefillLaunch& launch, const PrefillItem& item, uint8_t* shared)
      : launch_(launch),
        params_(launch.params),
        plan_(launch.plan),
        item_(item),
        shared_(shared),
        lane_(threadIdx.x % 32),
        unit_(threadIdx.x / 128),
        block_(unit_ == 0 ? item.block[0] : item.block[1]),
        first_bf16_block_(PrefillFirstBf16Block(launch.params, item.granule.request)),
        row_(threadIdx.x / 32 % 4 * 16 + lane_ / 4),
        queries_(SharedRowsAt(shared + unit_ * Tile::kRowsBytes +
                              SharedRows::Offset<kDim>(threadIdx.x / 32 % 4 * 16, 0))) {}

  __device__ void Run() {
    RotateQueries();
    const PrefillScale scale = PrefillScaleOf(params_);
    const int count = item_.pages_count;
    if (count > 0) LoadPage(0);
    if (Tile::kStages == 2) CopyAsyncCommit();
    for (int i = 0; i < count; ++i) {
      if (Tile::kStages == 2) {
        if (i + 1 < count) LoadPage(i + 1);
        CopyAsyncCommit();
        CopyAsyncWait<1>();
      } else {
        CopyAsyncCommit();
        CopyAsyncWait<0>();
      }
      __syncthreads();
      const PrefillPage page = PrefillPageOf(item_, i);
      if (PrefillSees(params_.plan.shape, block_, page)) AddPage(page, i, scale);
      __syncthreads();
      if (Tile::kStages == 1 && i + 1 < count) LoadPage(i + 1);
    }
    Finish(scale);
  }

 private:
  __device__ SharedRows Stage(int index, bool is_value) const {
    return SharedRowsAt(shared_ + 2 * Tile::kRowsBytes + index % Tile::kStages * Tile::kStageBytes +
                        (is_value ? Tile::kRowsBytes : 0));
  }

  // Queues the copy of 64 rows by the whole thread block; rows from rows_count on become 0.
  __device__ void LoadRows(const __nv_bfloat16* rows, int rows_count, const SharedRows& to) const {
    for (int index = threadIdx.x; index < 64 * kUnits; index += Tile::kThreads) {
      const uint32_t offset = SharedRows::Offset<kDim>(index / kUnits, index % kUnits);
      if (index / kUnits < rows_count) {
        CopyAsync16(to.address + offset, rows + index * 8);
      } else {
        *reinterpret_cast<uint4*>(to.bytes + offset) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  __device__ void LoadPage(int index) const {
    const PrefillPage page = PrefillPageOf(item_, index);
    const int64_t slot = PrefillSlotOf(params_, item_.granule, first_bf16_block_, page);
    const uint8_t* const block = page.is_int2
                                     ? plan_.history + slot * plan_.history_block_stride
                                     : params_.bf16_pages + slot * params_.bf16_block_stride;
    const auto* const run = reinterpret_cast<const __nv_bfloat16*>(block) +
                            int64_t{item_.kv_head} * 2 * kPrefillBlockTokens * kDim;
    const int rows =
        min(kPrefillBlockTokens, item_.granule.tokens.end - page.block * kPrefillBlockTokens);
    LoadRows(run, rows, Stage(index, false));
    LoadRows(run + kPrefillBlockTokens * kDim, rows, Stage(index, true));
  }
  // Rows [64 chunk, 64 chunk + 64) of the KV head's rotation, visible to all when it returns.
  __device__ void LoadRotationRows(const __nv_bfloat16* rotations, int chunk) const {
    const int head = params_.rotation_heads == 1 ? 0 : item_.kv_head;
    __syncthreads();
    LoadRows(rotations + (int64_t{head} * kDim + chunk * 64) * kDim, 64, Stage(0, false));
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();
  }

  // x += a rows: 16 rows (k) of a shared tile from `row` on, all channels.
  __device__ void MultiplyByRows(const uint32_t (&a)[4], const SharedRows& rows, int row,
                                 float (&x)[kUnits][4]) const {
#pragma unroll
    for (int n = 0; n < kUnits; n += 2) {
      uint32_t b[4];
      LoadMatrix4Transposed(
          b, rows.address + SharedRows::Offset<kDim>(row + (lane_ & 15), n + (lane_ >> 4)));
      MmaBf16(x[n], a, b[0], b[1]);
      MmaBf16(x[n + 1], a, b[2], b[3]);
    }
  }
  // x += a rows^T: channels [16 k, 16 k + 16) of a shared tile's 64 rows.
  __device__ void MultiplyByColumns(const uint32_t (&a)[4], const SharedRows& rows, int k,
                                    float (&x)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      LoadMatrix4(b,
                  rows.address + SharedRows::Offset<kDim>(n * 8 + (lane_ & 7) + ((lane_ >> 4) << 3),
                                                          2 * k + (lane_ >> 3 & 1)));
      MmaBf16(x[n], a, b[0], b[1]);
      MmaBf16(x[n + 1], a, b[2], b[3]);
    }
  }
  // Tiles of fp32 as bf16 to the warp's rows of shared memory, channels from 8 `unit` on.
  template <int kTiles>
  __device__ void WriteRows(const float (&x)[kTiles][4], int unit) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(
            queries_.bytes + SharedRows::Offset<kDim>(lane_ / 4 + 8 * half, unit + j) +
            (lane_ & 3) * 4) = PackBf16(x[j][2 * half], x[j][2 * half + 1]);
      }
    }
  }

  __device__ void RotateQueries() {
    const PrefillUnitRows rows = PrefillUnitRowsOf(params_.plan.shape, item_, unit_);
    const int64_t offset[2] = {rows.RowOrNone(row_) * kDim, rows.RowOrNone(row_ + 8) * kDim};
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      LoadRotationRows(params_.r_k, chunk);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
        LoadQueries(params_.q, offset, 4 * chunk + k, lane_, a);
        MultiplyByRows(a, Stage(0, false), 16 * k, o_);
      }
    }
    WriteRows(o_, 0);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o_[j][e] = 0.0f;
    }
    __syncthreads();
  }

  __device__ void AddPage(const PrefillPage& page, int index, const PrefillScale& scale) {
    const PrefillShape& shape = params_.plan.shape;
    const SharedRows keys = Stage(index, false);
    const SharedRows values = Stage(index, true);
    float s[8][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4];
      LoadMatrix4(a, queries_.address + SharedRows::Offset<kDim>(lane_ & 15, 2 * k + (lane_ >> 4)));
      MultiplyByColumns(a, keys, k, s);
    }
    if (scale.cap > 0.0f) CapScores(scale, s);
    if (PrefillNeedsMask(shape, block_, page)) {
      MaskScores<0>(shape, block_ * kPrefillBlockTokens + row_, page.block, lane_, s);
    }
    float factor[2];
    SoftmaxStep(scale.log2, s, &rows_, factor);
    ScaleRows(factor, o_);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t a[4];
      PackTiles(s[2 * k], s[2 * k + 1], a);
      MultiplyByRows(a, values, 16 * k, o_);
    }
  }

  __device__ void Finish(const PrefillScale& scale) {
    if (item_.no_room) rows_.sum[0] = rows_.sum[1] = __int_as_float(0x7fc00000);
    auto* const flags = reinterpret_cast<uint32_t*>(shared_ + Tile::kFlags);
    const bool last = MergePieces(
        launch_, item_, unit_, flags + unit_, [] { __syncthreads(); }, o_, &rows_);
    float factor[2];
    float lse[2];
    const int head = unit_ == 0 ? item_.head[0] : item_.head[1];
    FinishRows(params_, scale.log2, head, rows_, factor, lse);
    ScaleRows(factor, o_);
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      LoadRotationRows(params_.r_v, chunk);
      float x[8][4] = {};
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[4];
        uint32_t rest[4];
        PackTiles(o_[2 * k], o_[2 * k + 1], a);
        PackRest(o_[2 * k], o_[2 * k + 1], a, rest);
        MultiplyByColumns(a, Stage(0, false), k, x);
        MultiplyByColumns(rest, Stage(0, false), k, x);
      }
      WriteRows(x, 8 * chunk);
    }
    __syncwarp();
    if (last) Store(lse);
  }

  __device__ void Store(const float (&lse)[2]) const {
    const PrefillUnitRows rows = PrefillUnitRowsOf(params_.plan.shape, item_, unit_);
    const int first = row_ - lane_ / 4;
#pragma unroll 4
    for (int index = lane_; index < 16 * kUnits; index += 32) {
      const int row = first + index / kUnits;
      if (!rows.Has(row)) continue;
      *reinterpret_cast<uint4*>(params_.out + rows.Row(row) * kDim + index % kUnits * 8) =
          *reinterpret_cast<const uint4*>(queries_.bytes +
                                          SharedRows::Offset<kDim>(index / kUnits, index % kUnits));
    }
    if (params_.lse == nullptr || lane_ % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      if (rows.Has(row)) params_.lse[rows.Row(row)] = lse[half];
    }
  }

  const PrefillLaunch& launch_;
  const PrefillParams& params_;
  const PrefillPlan& plan_;
  const PrefillItem& item_;
  uint8_t* const shared_;
  const int lane_;
  const int unit_;
  const int block_;
  const int first_bf16_block_;
  const int row_;  // The thread's first one, of the unit's 64
  const SharedRows queries_;
  PrefillRows rows_;
  float o_[kUnits][4] = {};
};

template <int kDim>
__global__ __launch_bounds__(256, 1) void PrefillMmaKernel(
    const __grid_constant__ PrefillLaunch launch) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "rotations come 64 rows at a time");
  extern __shared__ __align__(128) uint8_t shared[];
  const PrefillShape& shape = launch.params.plan.shape;
  if (blockIdx.x >= *launch.plan.granules_count * PrefillItemsOfHeads(shape)) return;
  PrefillItem item;
  if (!PrefillItemOf(shape, launch.plan, blockIdx.x, &item)) return;
  PrefillMmaWarp<kDim>(launch, item, shared).Run();
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_MMA_CUH_

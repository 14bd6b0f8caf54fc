#ifndef OKV_KERNELS_CUDA_ATTEND_KERNEL_CUH_
#define OKV_KERNELS_CUDA_ATTEND_KERNEL_CUH_

#include "kernels/cuda/attend_ring.cuh"
#include "kernels/cuda/attend_warp.cuh"

// The decode attention kernel. One thread block a multiprocessor, persistent over its pieces
// (attend_plan.cuh). In a piece the warps are independent: units go round to them, each has its own
// ring and its own sums; they meet at the piece's end. A pair cut over several blocks is merged by
// the last of them to arrive.
namespace okv::cuda {

// A thread's 16 bytes of a pair's queries. Finding them takes some 50 ns, which pass before the
// kernel in front has ended.
template <class T>
class QueryCopy {
 public:
  __device__ __forceinline__ QueryCopy(const AttendKernelParams& params, const Piece& piece) {
    static_assert(T::kRows * kPerRow <= T::kThreads);
    const DecodeShape& shape = params.decode.shape;
    const int row = piece.row_begin + static_cast<int>(threadIdx.x) / kPerRow;
    if (row >= static_cast<int>(params.geometry.rows)) return;
    const int group = params.query_group;
    const int64_t token = static_cast<int64_t>(piece.request) * shape.query_tokens + row / group;
    const int64_t head = static_cast<int64_t>(piece.kv_head) * group + row % group;
    source_ =
        params.decode.q + (token * shape.query_heads + head) * T::kDim + threadIdx.x % kPerRow * 8;
  }

  // Asks for them; rows that do not exist become 0.
  __device__ __forceinline__ void Request(__nv_bfloat16 (&to)[T::kRows][T::kDim]) const {
    if (threadIdx.x >= T::kRows * kPerRow) return;
    __nv_bfloat16* destination = &to[threadIdx.x / kPerRow][threadIdx.x % kPerRow * 8];
    if (source_ == nullptr) {
      *reinterpret_cast<uint4*>(destination) = {0, 0, 0, 0};
    } else {
      CopyAsync16(SharedAddress(destination), source_);
    }
  }

 private:
  static constexpr int kPerRow = T::kDim / 8;
  const __nv_bfloat16* source_ = nullptr;
};

// Rows 4 pair .. 4 pair + 3 of each 16 rows of R, channels 16 tile + 2 row and the next one.
template <class T>
__device__ __forceinline__ void LoadRotation(const __nv_bfloat16* r, int tile,
                                             uint32_t (&words)[T::kDim / 16][4]) {
  const int row = threadIdx.x % 32 / 4;
  const int pair = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[step][i] = __ldg(reinterpret_cast<const uint32_t*>(
          r + (16 * step + 4 * pair + i) * T::kDim + 16 * tile + 2 * row));
    }
  }
}

// Channels 16 tile .. 16 tile + 15 of q R: matrix R^T [16 channels x d] times q^T [d x rows].
// Matrix rows 0 .. 7 are even channels, 8 .. 15 odd ones; the order of the terms is free.
template <class T>
__device__ __forceinline__ void RotateQueries(const uint32_t (&words)[T::kDim / 16][4], int tile,
                                              const __nv_bfloat16 (&raw)[T::kRows][T::kDim],
                                              Shared<T>* shared) {
  const int row = threadIdx.x % 32 / 4;
  const int pair = threadIdx.x % 4;
#pragma unroll
  for (int part = 0; part < T::kRowTiles; ++part) {
    float sums[2][4] = {};  // Two, so that a product does not wait for the one before
#pragma unroll
    for (int step = 0; step < T::kDim / 16; ++step) {
      const uint32_t(&w)[4] = words[step];
      const uint32_t a[4] = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                             __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632)};
      uint2 b = {0, 0};
      if (8 * part + row < T::kRows) {
        b = *reinterpret_cast<const uint2*>(&raw[8 * part + row][16 * step + 4 * pair]);
      }
      MmaBf16(sums[step % 2], a, b.x, b.y);
    }
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums[0][i] + sums[1][i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = 8 * part + 2 * pair + i;
      if (query >= T::kRows) continue;
      const int channel = 16 * tile + 2 * row;
      const uint32_t high = PackBf16(d[i], d[2 + i]);
      *reinterpret_cast<uint32_t*>(&shared->query_parts[T::HighColumn(query)][channel]) = high;
      *reinterpret_cast<uint32_t*>(&shared->query_parts[T::LowColumn(query)][channel]) =
          PackBf16(d[i] - LowBf16(high), d[2 + i] - HighBf16(high));
    }
  }
}

// Rows 16 tile + row and + 8 of R_V, channels 8 pair .. 8 pair + 7 of each 32.
template <class T>
__device__ __forceinline__ void LoadOutputRotation(const __nv_bfloat16* r, int tile,
                                                   uint4 (&words)[T::kDim / 32][2]) {
  const int row = threadIdx.x % 32 / 4;
  const int pair = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < T::kDim / 32; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[step][i] = __ldg(reinterpret_cast<const uint4*>(
          r + (16 * tile + row + 8 * i) * T::kDim + 32 * step + 8 * pair));
    }
  }
}

// Channels 16 tile .. of the piece's output: matrix R_V [16 x d] times o^T [d x rows], to memory.
template <class T>
__device__ __forceinline__ void RotateOutput(const AttendKernelParams& params, const Piece& piece,
                                             const uint4 (&words)[T::kDim / 32][2], int tile,
                                             const Shared<T>& shared) {
  const int row = threadIdx.x % 32 / 4;
  const int pair = threadIdx.x % 4;
  const DecodeShape& shape = params.decode.shape;
#pragma unroll
  for (int part = 0; part < T::kRowTiles; ++part) {
    float sums[2][4] = {};  // Two, so that a product does not wait for the one before
#pragma unroll
    for (int step = 0; step < T::kDim / 32; ++step) {
      const uint4(&w)[2] = words[step];
#pragma unroll
      for (int i = 0; i < T::kParts; ++i) {
        const uint4 b = *reinterpret_cast<const uint4*>(
            &shared.output_parts[8 * (part * T::kParts + i) + row][32 * step + 8 * pair]);
        const uint32_t first[4] = {w[0].x, w[1].x, w[0].y, w[1].y};
        const uint32_t second[4] = {w[0].z, w[1].z, w[0].w, w[1].w};
        MmaBf16(sums[0], first, b.x, b.y);
        MmaBf16(sums[1], second, b.z, b.w);
      }
    }
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = sums[0][i] + sums[1][i];
#pragma unroll
    for (int i = 0; i < (T::kLaneRows == 1 ? 1 : 2); ++i) {
      const int local = T::kLaneRows == 1 ? pair : 8 * part + 2 * pair + i;
      const int query = piece.row_begin + local;
      if (query >= static_cast<int>(params.geometry.rows)) continue;
      const int group = params.query_group;
      const int64_t token =
          static_cast<int64_t>(piece.request) * shape.query_tokens + query / group;
      const int64_t head = static_cast<int64_t>(piece.kv_head) * group + query % group;
      __nv_bfloat16* out =
          params.decode.out + (token * shape.query_heads + head) * T::kDim + 16 * tile + row;
      out[0] = __float2bfloat16(T::kLaneRows == 1 ? d[0] + d[1] : d[i]);
      out[8] = __float2bfloat16(T::kLaneRows == 1 ? d[2] + d[3] : d[2 + i]);
    }
  }
}

// The result of a pair for one query row: maximum and sum so far. A thread has one row and every
// kChannelStride-th channel, as far as there are so many.
template <class T>
struct RowResult {
  static constexpr int kChannelStride = T::kThreads / T::kRows;
  static constexpr int kChannels = (T::kDim + kChannelStride - 1) / kChannelStride;
  float maximum;
  float sum;
  float output[kChannels];

  __device__ __forceinline__ static int Row() { return threadIdx.x % T::kRows; }
  __device__ __forceinline__ static int Channel(int i) {
    return threadIdx.x / T::kRows + i * kChannelStride;
  }
  __device__ __forceinline__ static bool Has(int i) {
    return T::kDim % kChannelStride == 0 || Channel(i) < T::kDim;
  }

  // Merges the warps' sums in shared memory.
  __device__ __forceinline__ void MergeWarps(Shared<T>* shared) {
    Begin<T::kWarps>(*shared);
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      Add(*shared, w, shared->SumsOf(w, Ring<T>::kUnits), shared->HasSums(w));
    }
  }

  // Merges what BlockMerge left at `outputs`.
  template <int kParts>
  __device__ __forceinline__ void MergeSplits(const Shared<T>& shared, const float* outputs) {
    Begin<kParts>(shared);
#pragma unroll
    for (int i = 0; i < kParts; ++i) Add(shared, i, outputs + i * T::kDim * T::kRows, true);
  }

  __device__ __forceinline__ void Store(const DecodeWorkspace& workspace, int slot) const {
    const int row = Row();
    float* outputs = workspace.partial_outputs + static_cast<int64_t>(slot) * T::kDim * T::kRows;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (Has(i)) __stcg(outputs + Channel(i) * T::kRows + row, output[i]);
    }
    if (threadIdx.x < T::kRows) {
      __stcg(workspace.partial_sums + (2 * slot) * T::kRows + row, maximum);
      __stcg(workspace.partial_sums + (2 * slot + 1) * T::kRows + row, sum);
    }
  }

  // Adds the sink logit, divides, writes lse and what RotateOutput() reads.
  __device__ __forceinline__ void Normalize(const AttendKernelParams& params, const Piece& piece,
                                            Shared<T>* shared) {
    constexpr float kLog2E = 1.4426950408889634f;
    const int row = Row();
    const int query = piece.row_begin + row;
    const bool exists = query < static_cast<int>(params.geometry.rows);
    const int group = params.query_group;
    const int head = piece.kv_head * group + query % group;
    float factor = 1.0f;
    if (params.decode.sink_logits != nullptr && exists) {
      const float logit = params.decode.sink_logits[head] * kLog2E;
      const float largest = fmaxf(maximum, logit);
      factor = Exp2(maximum - largest);
      sum = fmaf(sum, factor, Exp2(logit - largest));
      maximum = largest;
    }
    if (params.decode.lse != nullptr && exists && threadIdx.x < T::kRows) {
      const DecodeShape& shape = params.decode.shape;
      const int64_t token =
          static_cast<int64_t>(piece.request) * shape.query_tokens + query / group;
      params.decode.lse[token * shape.query_heads + head] =
          sum == 0.0f ? -INFINITY : (maximum + log2f(sum)) / kLog2E;
    }
    factor = sum == 0.0f ? 0.0f : __fdividef(factor, sum);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (!Has(i)) continue;
      const float value = output[i] * factor;
      const __nv_bfloat16 high = __float2bfloat16(value);
      shared->output_parts[T::HighColumn(row)][Channel(i)] = high;
      shared->output_parts[T::LowColumn(row)][Channel(i)] =
          __float2bfloat16(value - __bfloat162float(high));
    }
  }

 private:
  template <int kParts>
  __device__ __forceinline__ void Begin(const Shared<T>& shared) {
    maximum = kNothing;
#pragma unroll
    for (int w = 0; w < kParts; ++w) maximum = fmaxf(maximum, shared.maxima[w][Row()]);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) output[i] = 0.0f;
  }

  // Part `index`. Without a branch, so that all parts' loads are in flight together.
  __device__ __forceinline__ void Add(const Shared<T>& shared, int index, const float* from,
                                      bool exists) {
    const int row = Row();
    const float factor = Exp2(shared.maxima[index][row] - maximum);
    sum = fmaf(factor, shared.sums[index][row], sum);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (!Has(i)) continue;
      const float value = from[Channel(i) * T::kRows + row];
      output[i] = fmaf(factor, exists ? value : 0.0f, output[i]);
    }
  }
};

// Merges what the thread blocks [begin, end) stored, of which the first began the pair, into the
// first kSplits parts in shared memory. A thread takes four rows of a channel; where there are more
// threads than that, they share the blocks.
template <class T>
struct BlockMerge {
  static constexpr int kQuads = T::kDim * T::kRows / 4;
  static constexpr int kSplits = kQuads >= T::kThreads ? 1 : T::kThreads / kQuads;
  static_assert(kQuads >= T::kThreads || T::kThreads % kQuads == 0);
  static_assert(kSplits <= T::kWarps);
  static_assert(!T::kSumsInRing || kSplits * T::kSumBytes <= T::kPages * T::kSlotBytes);

  // `outputs`: [kSplits][kDim][kRows]
  __device__ __forceinline__ static void Run(const DecodeWorkspace& workspace, int begin, int end,
                                             float* outputs, Shared<T>* shared) {
#pragma unroll
    for (int first = 0; first < kQuads; first += T::kThreads) {
      const int index = first + threadIdx.x;
      if (kSplits == 1 && index >= kQuads) break;
      const int split = index / kQuads % kSplits;
      MergeQuad(workspace, begin, end, index % kQuads, split, outputs + split * T::kDim * T::kRows,
                shared);
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ static float4 Load(const float* from) {
    return __ldcg(reinterpret_cast<const float4*>(from));
  }

  __device__ __forceinline__ static void MergeQuad(const DecodeWorkspace& workspace, int begin,
                                                   int end, int quad, int split, float* to,
                                                   Shared<T>* shared) {
    constexpr int kBatch = 9;  // Blocks whose loads are in flight
    const int row = quad % (T::kRows / 4) * 4;
    const int channel = quad / (T::kRows / 4);
    float maximum[4];
    float sum[4] = {};
    float output[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) maximum[r] = kNothing;
    for (int first = begin + split; first < end; first += kBatch * kSplits) {
      float4 maxima[kBatch];
      float4 sums[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int block = first + k * kSplits;
        maxima[k] = make_float4(kNothing, kNothing, kNothing, kNothing);
        sums[k] = values[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (block >= end) continue;
        const int64_t slot = 2 * block + (block == begin ? 1 : 0);
        maxima[k] = Load(workspace.partial_sums + 2 * slot * T::kRows + row);
        sums[k] = Load(workspace.partial_sums + (2 * slot + 1) * T::kRows + row);
        values[k] = Load(workspace.partial_outputs + (slot * T::kDim + channel) * T::kRows + row);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float largest = maximum[r];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) largest = fmaxf(largest, (&maxima[k].x)[r]);
        const float old = Exp2(maximum[r] - largest);
        maximum[r] = largest;
        sum[r] *= old;
        output[r] *= old;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float factor = Exp2((&maxima[k].x)[r] - largest);
          sum[r] = fmaf(factor, (&sums[k].x)[r], sum[r]);
          output[r] = fmaf(factor, (&values[k].x)[r], output[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      to[channel * T::kRows + row + r] = output[r];
      if (channel != 0) continue;
      shared->maxima[split][row + r] = maximum[r];
      shared->sums[split][row + r] = sum[r];
    }
  }
};

// Whether this block is the last of [begin, end) to store its part of the pair.
template <class T>
__device__ __forceinline__ bool ArriveLast(const AttendKernelParams& params, int pair, int parts,
                                           Shared<T>* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t before = AtomicAddAcquireRelease(params.workspace.arrivals + pair, 1);
    shared->last_arrival = before == static_cast<uint32_t>(parts - 1);
    if (shared->last_arrival) params.workspace.arrivals[pair] = 0;
  }
  __syncthreads();
  return shared->last_arrival != 0;
}

template <class T>
__device__ __forceinline__ const __nv_bfloat16* RotationOf(const __nv_bfloat16* rotations,
                                                           const AttendKernelParams& params,
                                                           const Piece& piece) {
  const int rotation = params.decode.rotation_heads == 1 ? 0 : piece.kv_head;
  return rotations + static_cast<int64_t>(rotation) * T::kDim * T::kDim;
}

template <class T>
__device__ __forceinline__ void PrefetchRotation(const __nv_bfloat16* r) {
  for (int i = 64 * threadIdx.x; i < T::kDim * T::kDim; i += 64 * T::kThreads) PrefetchToL2(r + i);
}

// A piece's end: all warps of the block, then all blocks of the pair.
template <class T>
__device__ __forceinline__ void FinishPiece(const AttendKernelParams& params,
                                            const BlockPlan& block, const Piece& piece,
                                            Shared<T>* shared) {
  const int warp = threadIdx.x / 32;
  const __nv_bfloat16* r_v = RotationOf<T>(params.decode.r_v, params, piece);
  // Loaded early: its time passes in the merge.
  uint4 words[T::kDim / 32][2];
  if (T::kPreloadsOutputRotation && warp < T::kChannelTiles) {
    LoadOutputRotation<T>(r_v, warp, words);
  }
  __syncthreads();
  RowResult<T> result;
  result.MergeWarps(shared);
  const int begin = piece.pair == block.first_pair ? block.first_pair_begin : blockIdx.x;
  const int end = piece.pair == block.first_pair  ? block.first_pair_end
                  : piece.pair == block.last_pair ? block.last_pair_end
                                                  : blockIdx.x + 1;
  if (end - begin > 1) {
    result.Store(params.workspace,
                 2 * blockIdx.x + (begin == static_cast<int>(blockIdx.x) ? 1 : 0));
    if (!ArriveLast<T>(params, piece.pair, end - begin, shared)) return;
    // A part of a pair has a unit, so one of its warps has a place for sums.
    int place = 0;
    while (!shared->HasSums(place)) ++place;
    float* merged = shared->SumsOf(place, Ring<T>::kUnits);
    BlockMerge<T>::Run(params.workspace, begin, end, merged, shared);
    result.template MergeSplits<BlockMerge<T>::kSplits>(*shared, merged);
  }
  result.Normalize(params, piece, shared);
  __syncthreads();
  for (int tile = warp; tile < T::kChannelTiles; tile += T::kThreads / 32) {
    if (tile != warp || !T::kPreloadsOutputRotation) LoadOutputRotation<T>(r_v, tile, words);
    RotateOutput<T>(params, piece, words, tile, *shared);
  }
}

// Queries of a piece: rotated, into shared memory. `words` is the warp's part of R_K.
template <class T>
__device__ __forceinline__ void BeginPiece(const AttendKernelParams& params, const Piece& piece,
                                           uint32_t (&words)[T::kDim / 16][4], Shared<T>* shared) {
  const int warp = threadIdx.x / 32;
  const __nv_bfloat16* r_k = RotationOf<T>(params.decode.r_k, params, piece);
  CopyAsyncWaitAll();
  __syncthreads();
#pragma unroll 1
  for (int tile = warp; tile < T::kChannelTiles; tile += T::kThreads / 32) {
    if (tile != warp || !T::kPreloadsRotation) LoadRotation<T>(r_k, tile, words);
    RotateQueries<T>(words, tile, shared->query_raw, shared);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = warp; row < T::kRows; row += T::kThreads / 32) {
    QuantizeQuery<T>(params, row, shared);
  }
  __syncthreads();
}

// The warp's part of R_K, early: with few rows in registers, otherwise as far as the L2.
template <class T>
__device__ __forceinline__ void PreloadRotation(const AttendKernelParams& params,
                                                const Piece& piece,
                                                uint32_t (&words)[T::kDim / 16][4]) {
  const __nv_bfloat16* r_k = RotationOf<T>(params.decode.r_k, params, piece);
  const int warp = threadIdx.x / 32;
  if (!T::kPreloadsRotation) {
    PrefetchRotation<T>(r_k);
  } else if (warp < T::kChannelTiles) {
    LoadRotation<T>(r_k, warp, words);
  }
}

// Asks for the first piece's queries and fills the ring; pages that the kernel in front does not
// write are asked for before it has ended.
template <class T>
__device__ __forceinline__ void StartLoads(const AttendKernelParams& params, const Piece& piece,
                                           Ring<T>* ring, Shared<T>* shared) {
  const QueryCopy<T> queries(params, piece);
  int requested = 0;
  if (params.decode.early_history) {
    for (; requested < (Ring<T>::kUnits + 1) / 2 && !ring->NextIsBf16(); ++requested) {
      ring->Request(requested);
    }
    WaitForKernelBefore();
  }
  queries.Request(shared->query_raw);
  for (; requested < Ring<T>::kUnits; ++requested) ring->Request(requested);
  if (T::kPrefetchesUnit && piece.Units() >= T::kPrefetchPieceUnits) ring->PrefetchNext();
  LetNextKernelStart();
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    AttendKernel(const __grid_constant__ AttendKernelParams params) {
  static_assert(T::kThreads % T::kRows == 0);
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared<T>* shared = reinterpret_cast<Shared<T>*>(shared_bytes);
  const int warp = threadIdx.x / 32;
  if (!params.decode.early_history) WaitForKernelBefore();
  // In shared memory, so that it takes no registers in the loop.
  const BlockPlan& block = shared->block;
  if (threadIdx.x == 0) {
    shared->block = LoadBlockPlan(params.workspace.blocks + blockIdx.x);
  }
  __syncthreads();
  if (block.first_pair > block.last_pair) return;
  Ring<T> ring(params, block, shared);

  // Rotation and queries before the ring: filling it queues some 5 us of memory time in front of
  // any other load.
  Piece piece = FirstPiece(block);
  uint32_t words[T::kDim / 16][4];
  PreloadRotation<T>(params, piece, words);
  PrefetchRotation<T>(RotationOf<T>(params.decode.r_v, params, piece));
  StartLoads<T>(params, piece, &ring, shared);

  WarpSums<T> sums;
  int index = warp;  // of the warp's next unit in the piece
  while (true) {
    const bool more = piece.pair < block.last_pair;
    BeginPiece<T>(params, piece, words, shared);
    sums.Begin(params, piece, *shared);
    if (more) {
      Piece next = piece;
      NextPiece(params, block, &next);
      QueryCopy<T>(params, next).Request(shared->query_raw);
    }
    for (; index < piece.Units(); index += T::kWarps) {
      const UnitSlots<T> slots = ring.Wait();
      if (piece.IsInt2(index)) {
        sums.AddInt2(params, piece, piece.Int2Unit(index), slots);
      } else {
        sums.AddBf16(params, piece, piece.Bf16Unit(index), slots, *shared);
      }
      __syncwarp();
      if (!T::kSumsInRing || index + T::kWarps < piece.Units()) {
        ring.Request(ring.LastUsed());
      }
    }
    // Less than kWarps at the begin of the piece.
    if (T::kSumsInRing) {
      if (threadIdx.x % 32 == 0) shared->sums_at[warp] = index < T::kWarps ? -1 : ring.LastUsed();
      __syncwarp();
    }
    index -= piece.Units();
    sums.Finish(shared);
    FinishPiece<T>(params, block, piece, shared);
    if (!more) return;
    if (T::kSumsInRing && shared->sums_at[warp] >= 0) {
#if __CUDA_ARCH__ >= 900
      FenceBeforeBulkCopy();
#endif
      __syncwarp();
      ring.Request(ring.LastUsed());
    }
    NextPiece(params, block, &piece);
    PreloadRotation<T>(params, piece, words);
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_KERNEL_CUH_

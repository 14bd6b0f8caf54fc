// Prefill attention on sm_90a: see prefill_wgmma.cuh.

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels/cuda/early_launch.h"
#include "kernels/cuda/prefill_launch.h"
#include "kernels/cuda/prefill_wgmma.cuh"

namespace okv::cuda {
namespace {

template <int kDim>
__global__ __launch_bounds__(PrefillWgmmaTile<kDim>::kThreads, 1) void PrefillWgmmaKernel(
    const __grid_constant__ PrefillLaunch launch, const __grid_constant__ PrefillTensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  PrefillWgmma<kDim>(launch, maps, shared);
#else
  __trap();  // LaunchPrefillWgmma() is for sm_90 only.
#endif
}

PFN_cuTensorMapEncodeTiled_v12000 FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

struct TensorShape {
  const void* base;
  uint32_t rank;
  cuuint64_t dims[4];
  cuuint64_t strides[3];  // Bytes, of all dimensions but the first
  cuuint32_t box[4];
};

bool Encode(const TensorShape& tensor, CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = FindEncode();
  if (encode == nullptr) return false;
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, tensor.rank, const_cast<void*>(tensor.base),
                tensor.dims, tensor.strides, tensor.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool EncodePages(const PrefillShape& shape, const uint8_t* base, int64_t block_stride,
                 CUtensorMap* map) {
  const cuuint64_t row = shape.head_dim * 2;
  // A pool's number of blocks is not known: tables name only those that are there.
  const cuuint64_t slots = 0x7fffffff;
  return Encode(
      {.base = base,
       .rank = 4,
       .dims = {shape.head_dim, 2 * kPrefillBlockTokens, shape.kv_heads, slots},
       .strides = {row, 2 * kPrefillBlockTokens * row, static_cast<cuuint64_t>(block_stride)},
       .box = {64, 64, 1, 1}},
      map);
}

bool EncodeQueries(const PrefillParams& params, CUtensorMap* map) {
  const PrefillShape& shape = params.plan.shape;
  const cuuint64_t row = shape.head_dim * 2;
  return Encode({.base = params.q,
                 .rank = 3,
                 .dims = {shape.head_dim, shape.query_heads, shape.query_tokens_max},
                 .strides = {row, shape.query_heads * row},
                 .box = {64, 1, 64}},
                map);
}

bool EncodeMaps(const PrefillLaunch& launch, PrefillTensorMaps* maps) {
  const PrefillParams& params = launch.params;
  const PrefillShape& shape = params.plan.shape;
  const auto rotations = [&](const __nv_bfloat16* base, CUtensorMap* map) {
    return Encode({.base = base,
                   .rank = 2,
                   .dims = {shape.head_dim, shape.head_dim * params.rotation_heads},
                   .strides = {shape.head_dim * 2},
                   .box = {64, 64}},
                  map);
  };
  if (!EncodeQueries(params, &maps->q)) return false;
  if (!EncodePages(shape, params.bf16_pages, params.bf16_block_stride, &maps->bf16)) return false;
  maps->history = maps->bf16;
  if (shape.history_blocks_max > 0 &&
      !EncodePages(shape, launch.plan.history, launch.plan.history_block_stride, &maps->history)) {
    return false;
  }
  return rotations(params.r_k, &maps->r_k) && rotations(params.r_v, &maps->r_v);
}

template <int kDim>
cudaError_t Launch(const PrefillLaunch& launch, const PrefillTensorMaps& maps,
                   cudaStream_t stream) {
  using Tile = PrefillWgmmaTile<kDim>;
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(PrefillWgmmaKernel<kDim>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(Tile::kSharedBytes));
  if (error != cudaSuccess) return error;
  const uint32_t items_max = PrefillItemsMax(launch);
  const uint32_t blocks = items_max < static_cast<uint32_t>(sms) ? items_max : sms;
  return LaunchEarly(PrefillWgmmaKernel<kDim>,
                     {.gridDim = dim3(blocks),
                      .blockDim = dim3(Tile::kThreads),
                      .dynamicSmemBytes = Tile::kSharedBytes,
                      .stream = stream},
                     /*early=*/true, launch, maps);
}

}  // namespace

cudaError_t LaunchPrefillWgmma(const PrefillLaunch& launch, cudaStream_t stream) {
  PrefillTensorMaps maps;
  if (!EncodeMaps(launch, &maps)) return cudaErrorNotSupported;
  switch (launch.params.plan.shape.head_dim) {
    case 64:
      return Launch<64>(launch, maps, stream);
    case 128:
      return Launch<128>(launch, maps, stream);
    default:
      return Launch<256>(launch, maps, stream);
  }
}

}  // namespace okv::cuda

// FlashInfer's BF16 decode attention behind a C interface, for attend_peers.py: its batch decode
// kernel, and its paged prefill kernel with one query token a request, which is what its decode
// wrapper runs with use_tensor_cores. It includes FlashInfer's headers (0.6.8 compiles with CUDA
// 13.0), which are no part of this repository; attend_peers.py gives the command.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <memory>
#include <vector>

#ifndef OKV_HEAD_DIM
#define OKV_HEAD_DIM 128
#endif

namespace {

using Bf16 = __nv_bfloat16;
constexpr uint32_t kHeadDim = OKV_HEAD_DIM;
constexpr auto kNoRope = flashinfer::PosEncodingMode::kNone;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;
using DecodeParams = flashinfer::BatchDecodeParams<Bf16, Bf16, Bf16, int32_t>;
using PrefillParams = flashinfer::BatchPrefillPagedParams<Bf16, Bf16, Bf16, int32_t>;

constexpr size_t kFloatBytes = size_t{512} << 20;
constexpr size_t kIntBytes = size_t{16} << 20;

void Must(cudaError_t error) {
  if (error != cudaSuccess)
    throw flashinfer::Error(__func__, __FILE__, __LINE__, cudaGetErrorString(error));
}

// A step's plan and its workspace, for any number of layers; okv_flashinfer_free() frees it.
struct Plan {
  bool tensor_cores;
  uint32_t batch;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t page_tokens;
  void* floats = nullptr;
  void* ints = nullptr;
  int32_t* query_indptr = nullptr;  // [batch + 1], one query token a request
  flashinfer::DecodePlanInfo decode;
  flashinfer::PrefillPlanInfo prefill;

  template <class T>
  T* Int(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(ints) + offset);
  }
  template <class T>
  T* Float(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(floats) + offset);
  }
};

cudaError_t EstimateDecode(const Plan& plan, bool& split, uint32_t& grid, uint32_t& pages,
                           uint32_t& batch, uint32_t& heads, int32_t* indptr, cudaStream_t stream) {
  DISPATCH_GQA_GROUP_SIZE(plan.query_heads / plan.kv_heads, kGroup, {
    return flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<
        kGroup, kHeadDim, kNoRope, Variant, DecodeParams>(
        split, grid, pages, batch, heads, plan.batch, indptr, plan.query_heads, plan.page_tokens,
        /*enable_cuda_graph=*/false, stream);
  });
  return cudaErrorInvalidValue;
}

void PlanIt(const int32_t* indptr, Plan* plan) {
  Must(cudaMalloc(&plan->floats, kFloatBytes));
  Must(cudaMalloc(&plan->ints, kIntBytes));
  void* pinned = nullptr;
  Must(cudaMallocHost(&pinned, kIntBytes));
  std::vector<int32_t> kv(indptr, indptr + plan->batch + 1);
  std::vector<int32_t> queries(plan->batch + 1);
  for (uint32_t i = 0; i <= plan->batch; ++i) queries[i] = static_cast<int32_t>(i);
  Must(cudaMalloc(reinterpret_cast<void**>(&plan->query_indptr), queries.size() * 4));
  Must(cudaMemcpy(plan->query_indptr, queries.data(), queries.size() * 4, cudaMemcpyHostToDevice));
  if (plan->tensor_cores) {
    Must(flashinfer::PrefillPlan<int32_t>(
        plan->floats, kFloatBytes, plan->ints, pinned, kIntBytes, plan->prefill, queries.data(),
        kv.data(), plan->batch, plan->batch, plan->query_heads, plan->kv_heads, kHeadDim, kHeadDim,
        plan->page_tokens, /*enable_cuda_graph=*/false, /*sizeof_dtype_o=*/2, /*window_left=*/-1,
        /*fixed_split_size=*/-1, /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, nullptr));
  } else {
    const auto estimate = [plan](bool& split, uint32_t& grid, uint32_t& pages, uint32_t& batch,
                                 uint32_t& heads, uint32_t, int32_t* kv_indptr, uint32_t, uint32_t,
                                 bool, cudaStream_t stream) {
      return EstimateDecode(*plan, split, grid, pages, batch, heads, kv_indptr, stream);
    };
    Must((flashinfer::DecodePlan<kHeadDim, kNoRope, Variant, DecodeParams>(
        plan->floats, kFloatBytes, plan->ints, pinned, kIntBytes, plan->decode, kv.data(),
        plan->batch, plan->query_heads, plan->page_tokens, /*enable_cuda_graph=*/false, nullptr,
        estimate)));
  }
  Must(cudaDeviceSynchronize());
  Must(cudaFreeHost(pinned));
}

cudaError_t RunDecode(const Plan& plan, DecodeParams params, cudaStream_t stream) {
  const flashinfer::DecodePlanInfo& info = plan.decode;
  params.request_indices = plan.Int<int32_t>(info.request_indices_offset);
  params.kv_tile_indices = plan.Int<int32_t>(info.kv_tile_indices_offset);
  params.o_indptr = plan.Int<int32_t>(info.o_indptr_offset);
  params.kv_chunk_size_ptr = plan.Int<int32_t>(info.kv_chunk_size_ptr_offset);
  params.padded_batch_size = info.padded_batch_size;
  return flashinfer::BatchDecodeWithPagedKVCacheDispatched<kHeadDim, kNoRope, Variant>(
      params, info.split_kv ? plan.Float<Bf16>(info.v_offset) : nullptr,
      info.split_kv ? plan.Float<float>(info.s_offset) : nullptr, /*enable_pdl=*/true, stream);
}

cudaError_t RunPrefill(const Plan& plan, PrefillParams params, cudaStream_t stream) {
  const flashinfer::PrefillPlanInfo& info = plan.prefill;
  params.request_indices = plan.Int<int32_t>(info.request_indices_offset);
  params.qo_tile_indices = plan.Int<int32_t>(info.qo_tile_indices_offset);
  params.kv_tile_indices = plan.Int<int32_t>(info.kv_tile_indices_offset);
  params.o_indptr = plan.Int<int32_t>(info.o_indptr_offset);
  params.kv_chunk_size_ptr = plan.Int<int32_t>(info.kv_chunk_size_ptr_offset);
  params.merge_indptr = info.split_kv ? plan.Int<int32_t>(info.merge_indptr_offset) : nullptr;
  params.padded_batch_size = info.padded_batch_size;
  params.max_total_num_rows = info.total_num_rows;
  // 16 rows hold the heads of one KV head, up to GQA 16.
  if (info.cta_tile_q != 16) return cudaErrorInvalidValue;
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<16, kHeadDim, kHeadDim, kNoRope,
                                                            /*USE_FP16_QK_REDUCTION=*/false,
                                                            flashinfer::MaskMode::kNone, Variant>(
      params, info.split_kv ? plan.Float<Bf16>(info.v_offset) : nullptr,
      info.split_kv ? plan.Float<float>(info.s_offset) : nullptr, /*enable_pdl=*/true, stream);
}

}  // namespace

extern "C" {

// A plan for `batch` requests with kv_indptr[batch + 1] pages (host), or null, the reason on
// stderr.
void* okv_flashinfer_plan(int tensor_cores, uint32_t batch, uint32_t query_heads, uint32_t kv_heads,
                          uint32_t page_tokens, const int32_t* kv_indptr) {
  auto plan = std::make_unique<Plan>();
  plan->tensor_cores = tensor_cores != 0;
  plan->batch = batch;
  plan->query_heads = query_heads;
  plan->kv_heads = kv_heads;
  plan->page_tokens = page_tokens;
  try {
    PlanIt(kv_indptr, plan.get());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FlashInfer: %s\n", error.what());
    return nullptr;
  }
  return plan.release();
}

// Queues one layer: q and out [batch, query_heads, head_dim], k and v [pages, kv_heads,
// page_tokens, head_dim]; indptr, indices and last (tokens of each last page) on the device.
// Returns a cudaError_t.
int okv_flashinfer_run(const void* handle, void* q, void* k, void* v, int32_t* indptr,
                       int32_t* indices, int32_t* last, float scale, void* out, void* stream) {
  const Plan& plan = *static_cast<const Plan*>(handle);
  const auto queue = static_cast<cudaStream_t>(stream);
  const flashinfer::paged_kv_t<Bf16, int32_t> paged(
      plan.kv_heads, plan.page_tokens, kHeadDim, plan.batch, flashinfer::QKVLayout::kHND,
      static_cast<Bf16*>(k), static_cast<Bf16*>(v), indices, indptr, last);
  const auto row = static_cast<int32_t>(plan.query_heads * kHeadDim);
  try {
    if (plan.tensor_cores) {
      return RunPrefill(plan,
                        PrefillParams(static_cast<Bf16*>(q), paged, nullptr, plan.query_indptr,
                                      nullptr, nullptr, static_cast<Bf16*>(out), nullptr, nullptr,
                                      plan.query_heads, row, kHeadDim, /*window_left=*/-1,
                                      /*logits_soft_cap=*/0.0f, scale, 1.0f, 1e4f),
                        queue);
    }
    return RunDecode(plan,
                     DecodeParams(static_cast<Bf16*>(q), nullptr, paged, static_cast<Bf16*>(out),
                                  nullptr, nullptr, plan.query_heads, row, kHeadDim,
                                  /*window_left=*/-1, /*logits_soft_cap=*/0.0f, scale, 1.0f, 1e4f),
                     queue);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FlashInfer: %s\n", error.what());
    return cudaErrorUnknown;
  }
}

void okv_flashinfer_free(void* handle) {
  const std::unique_ptr<Plan> plan(static_cast<Plan*>(handle));
  cudaFree(plan->floats);
  cudaFree(plan->ints);
  cudaFree(plan->query_indptr);
}
}

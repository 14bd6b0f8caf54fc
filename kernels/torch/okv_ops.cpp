// torch.ops.okv.*: decode attention over INT2 pages, quantize and dequantize, for engine plug-ins.
// Built by okv_ops.py where torch is; not part of the CMake build.
//
// Layers are views: pages of one layer are [slots, kv_heads, run_bytes] uint8, of any stride between
// slots, bf16 blocks [slots, kv_heads, 2, 64, head_dim]. Every operator queues on the current stream,
// has a fake implementation, and can be captured in a CUDA graph. Bad arguments raise, naming the
// argument.

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/quantize.h"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const __nv_bfloat16* Bf16(const Tensor& tensor) {
  return reinterpret_cast<const __nv_bfloat16*>(tensor.const_data_ptr());
}

// Numbers in messages: streamed by TORCH_CHECK itself, a number ended the process where torch's wheel
// brings locale facets of its own.
std::string Text(int64_t number) { return std::to_string(number); }

void CheckTensor(const Tensor& tensor, const char* name, at::ScalarType type, int64_t dims) {
  TORCH_CHECK(tensor.is_cuda(), "okv: ", name, " is not on the GPU");
  TORCH_CHECK(tensor.scalar_type() == type, "okv: ", name, " is ", tensor.scalar_type(), ", not ",
              type);
  TORCH_CHECK(tensor.dim() == dims, "okv: ", name, " has ", Text(tensor.dim()),
              " dimensions, not ", Text(dims));
}

// All dimensions but the first are contiguous.
void CheckSlots(const Tensor& tensor, const char* name) {
  int64_t stride = 1;
  for (int64_t i = tensor.dim() - 1; i > 0; --i) {
    TORCH_CHECK(tensor.stride(i) == stride, "okv: ", name, " is not contiguous in dimension ",
                Text(i));
    stride *= tensor.size(i);
  }
}

void CheckLaunch(cudaError_t error, const char* name) {
  TORCH_CHECK(error != cudaErrorInvalidValue, "okv: ", name,
              ": shape, alignment or stride is not supported");
  TORCH_CHECK(error == cudaSuccess, "okv: ", name, ": ", cudaGetErrorString(error));
}

DecodeShape ShapeOf(int64_t batch, int64_t query_tokens, int64_t query_heads, int64_t kv_heads,
                    int64_t head_dim, int64_t group_size, at::IntArrayRef windows) {
  TORCH_CHECK(windows.size() == 4,
              "okv: windows is [sink_blocks, recent_blocks, ring_blocks, sliding_window]");
  DecodeShape shape = {};
  shape.batch = static_cast<uint32_t>(batch);
  shape.query_tokens = static_cast<uint32_t>(query_tokens);
  shape.query_heads = static_cast<uint32_t>(query_heads);
  shape.kv_heads = static_cast<uint32_t>(kv_heads);
  shape.head_dim = static_cast<uint32_t>(head_dim);
  shape.group_size = static_cast<uint32_t>(group_size);
  shape.sink_blocks = static_cast<uint32_t>(windows[0]);
  shape.recent_blocks = static_cast<uint32_t>(windows[1]);
  shape.ring_blocks = static_cast<uint32_t>(windows[2]);
  shape.sliding_window = static_cast<uint32_t>(windows[3]);
  return shape;
}

// A workspace for plan_decode and attend; one serves all layers of a step.
Tensor DecodeWorkspace(const Tensor& lengths, int64_t query_tokens, int64_t query_heads,
                       int64_t kv_heads, int64_t head_dim, int64_t group_size,
                       at::IntArrayRef windows) {
  const DecodeShape shape = ShapeOf(lengths.size(0), query_tokens, query_heads, kv_heads, head_dim,
                                    group_size, windows);
  const size_t bytes = DecodeWorkspaceBytes(shape);
  TORCH_CHECK(bytes > 0, "okv: decode_workspace: the shape is not supported");
  return at::empty({static_cast<int64_t>(bytes)}, lengths.options().dtype(at::kByte));
}

void PlanDecodeOp(const Tensor& lengths, Tensor& workspace, int64_t query_tokens,
                  int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t group_size,
                  at::IntArrayRef windows) {
  CheckTensor(lengths, "lengths", at::kInt, 1);
  CheckTensor(workspace, "workspace", at::kByte, 1);
  const c10::cuda::CUDAGuard guard(lengths.device());
  const DecodeShape shape = ShapeOf(lengths.size(0), query_tokens, query_heads, kv_heads, head_dim,
                                    group_size, windows);
  TORCH_CHECK(static_cast<size_t>(workspace.numel()) >= DecodeWorkspaceBytes(shape),
              "okv: workspace is smaller than decode_workspace() makes it");
  CheckLaunch(PlanDecode(shape, lengths.const_data_ptr<int32_t>(), workspace.data_ptr(),
                         at::cuda::getCurrentCUDAStream()),
              "plan_decode");
}

std::tuple<Tensor, Tensor> AttendOp(
    const Tensor& q, const Tensor& r_k, const Tensor& r_v, const Tensor& int2_pages,
    const Tensor& int2_table, const Tensor& bf16_blocks, const Tensor& bf16_table,
    const Tensor& lengths, Tensor& workspace, int64_t group_size, at::IntArrayRef windows,
    double softmax_scale, double logit_softcap, const OptionalTensor& sink_logits,
    bool early_history) {
  CheckTensor(q, "q", at::kBFloat16, 4);
  CheckTensor(r_k, "r_k", at::kBFloat16, 3);
  CheckTensor(r_v, "r_v", at::kBFloat16, 3);
  CheckTensor(int2_pages, "int2_pages", at::kByte, 3);
  CheckTensor(int2_table, "int2_table", at::kInt, 2);
  CheckTensor(bf16_blocks, "bf16_blocks", at::kBFloat16, 5);
  CheckTensor(bf16_table, "bf16_table", at::kInt, 2);
  CheckTensor(lengths, "lengths", at::kInt, 1);
  CheckTensor(workspace, "workspace", at::kByte, 1);
  CheckSlots(int2_pages, "int2_pages");
  CheckSlots(bf16_blocks, "bf16_blocks");
  TORCH_CHECK(q.is_contiguous() && r_k.is_contiguous() && r_v.is_contiguous(),
              "okv: q, r_k and r_v must be contiguous");
  const int64_t head_dim = q.size(3);
  const int64_t kv_heads = int2_pages.size(1);
  TORCH_CHECK(group_size > 0 && head_dim % group_size == 0 &&
                  int2_pages.size(2) == int2::RunBytes(head_dim, head_dim / group_size),
              "okv: int2_pages has ", Text(int2_pages.size(2)),
              " bytes a run, not those of head_dim ", Text(head_dim), " and group_size ",
              Text(group_size));
  TORCH_CHECK(bf16_blocks.size(1) == kv_heads && bf16_blocks.size(2) == 2 &&
                  bf16_blocks.size(3) == 64 && bf16_blocks.size(4) == head_dim,
              "okv: bf16_blocks is not [slots, kv_heads, 2, 64, head_dim]");
  const c10::cuda::CUDAGuard guard(q.device());
  DecodeParams params = {};
  params.shape =
      ShapeOf(q.size(0), q.size(1), q.size(2), kv_heads, head_dim, group_size, windows);
  TORCH_CHECK(int2_table.size(0) == q.size(0) && bf16_table.size(0) == q.size(0) &&
                  lengths.size(0) == q.size(0) && int2_table.stride(1) == 1 &&
                  bf16_table.stride(1) == 1 && bf16_table.size(1) >= windows[0] + windows[2],
              "okv: a table's rows are not those of q, or too short");
  params.q = Bf16(q);
  params.r_k = Bf16(r_k);
  params.r_v = Bf16(r_v);
  params.rotation_heads = static_cast<uint32_t>(r_k.size(0));
  params.int2_pages = int2_pages.const_data_ptr<uint8_t>();
  params.int2_block_stride = int2_pages.stride(0);
  params.int2_table = int2_table.const_data_ptr<int32_t>();
  params.int2_table_stride = int2_table.stride(0);
  params.bf16_pages = static_cast<const uint8_t*>(bf16_blocks.const_data_ptr());
  params.bf16_block_stride = bf16_blocks.stride(0) * 2;
  params.bf16_table = bf16_table.const_data_ptr<int32_t>();
  params.bf16_table_stride = bf16_table.stride(0);
  params.lengths = lengths.const_data_ptr<int32_t>();
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.logit_softcap = static_cast<float>(logit_softcap);
  params.sink_logits = sink_logits ? sink_logits->const_data_ptr<float>() : nullptr;
  Tensor out = at::empty_like(q);
  Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  params.out = reinterpret_cast<__nv_bfloat16*>(out.data_ptr());
  params.lse = lse.data_ptr<float>();
  params.workspace = workspace.data_ptr();
  params.early_history = early_history;
  CheckLaunch(Attend(params, at::cuda::getCurrentCUDAStream()), "attend");
  return {out, lse};
}

ConstPagedRows RowsOf(const Tensor& rows) {
  return {Bf16(rows), 0, rows.stride(0), 0, rows.stride(1), 1};
}

// Seals the full blocks of k and v, [tokens, kv_heads, head_dim], into pages[table[i]]. Returns one
// int64: -1, or the packed first row that has no int2 form (kernels/cuda/quantize.h).
Tensor QuantizeOp(const Tensor& k, const Tensor& v, const Tensor& r_k, const Tensor& r_v,
                  const OptionalTensor& clip_k, const OptionalTensor& clip_v, Tensor& pages,
                  const Tensor& table, int64_t group_size) {
  CheckTensor(k, "k", at::kBFloat16, 3);
  CheckTensor(v, "v", at::kBFloat16, 3);
  CheckTensor(pages, "pages", at::kByte, 3);
  CheckTensor(table, "table", at::kInt, 1);
  CheckSlots(pages, "pages");
  TORCH_CHECK(k.sizes() == v.sizes() && k.stride(2) == 1 && v.stride(2) == 1,
              "okv: k and v differ in shape, or their channels are not contiguous");
  TORCH_CHECK(r_k.is_contiguous() && r_v.is_contiguous() && r_k.sizes() == r_v.sizes(),
              "okv: r_k and r_v must be contiguous and alike");
  TORCH_CHECK(table.is_contiguous() && table.size(0) >= k.size(0) / 64,
              "okv: table has fewer entries than k has full blocks");
  const c10::cuda::CUDAGuard guard(k.device());
  Tensor bad_row = at::full({1}, -1, k.options().dtype(at::kLong));
  QuantizePagesParams params = {};
  params.layers_count = 1;
  params.kv_heads = static_cast<uint32_t>(k.size(1));
  params.head_dim = static_cast<uint32_t>(k.size(2));
  params.group_size = static_cast<uint32_t>(group_size);
  params.blocks_count = static_cast<uint32_t>(k.size(0) / 64);
  params.k = RowsOf(k);
  params.v = RowsOf(v);
  params.rotations = {Bf16(r_k), Bf16(r_v), static_cast<uint32_t>(r_k.size(0))};
  const auto ranks = [](const OptionalTensor& clip) {
    return clip ? reinterpret_cast<const uint32_t*>(clip->const_data_ptr<int32_t>()) : nullptr;
  };
  params.clip_rank_k = ranks(clip_k);
  params.clip_rank_v = ranks(clip_v);
  params.pages = {pages.data_ptr<uint8_t>(), pages.stride(0), 0, pages.stride(1),
                  table.const_data_ptr<int32_t>()};
  params.bad_row = reinterpret_cast<uint64_t*>(bad_row.data_ptr<int64_t>());
  if (params.blocks_count > 0) {
    CheckLaunch(QuantizePages(params, at::cuda::getCurrentCUDAStream()), "quantize");
  }
  return bad_row;
}

// Rows of pages[table[i]], [64 blocks, kv_heads, head_dim] each: in the rotated basis, or with r_k and
// r_v in the model's own.
std::tuple<Tensor, Tensor> DequantizeOp(const Tensor& pages, const Tensor& table,
                                        int64_t head_dim, int64_t group_size,
                                        const OptionalTensor& r_k, const OptionalTensor& r_v) {
  CheckTensor(pages, "pages", at::kByte, 3);
  CheckTensor(table, "table", at::kInt, 1);
  CheckSlots(pages, "pages");
  TORCH_CHECK(r_k.has_value() == r_v.has_value(), "okv: one of r_k and r_v is missing");
  const c10::cuda::CUDAGuard guard(pages.device());
  const int64_t tokens = 64 * table.size(0);
  Tensor k = at::empty({tokens, pages.size(1), head_dim}, pages.options().dtype(at::kBFloat16));
  Tensor v = at::empty_like(k);
  DequantizePagesParams params = {};
  params.layers_count = 1;
  params.kv_heads = static_cast<uint32_t>(pages.size(1));
  params.head_dim = static_cast<uint32_t>(head_dim);
  params.group_size = static_cast<uint32_t>(group_size);
  params.blocks_count = static_cast<uint32_t>(table.size(0));
  params.pages = {pages.const_data_ptr<uint8_t>(), pages.stride(0), 0, pages.stride(1),
                  table.const_data_ptr<int32_t>()};
  if (r_k.has_value()) {
    params.rotations = {Bf16(*r_k), Bf16(*r_v), static_cast<uint32_t>(r_k->size(0))};
  }
  const auto rows = [](Tensor& tensor) {
    return PagedRows{reinterpret_cast<__nv_bfloat16*>(tensor.data_ptr()), 0, tensor.stride(0), 0,
                     tensor.stride(1), 1};
  };
  params.k = rows(k);
  params.v = rows(v);
  if (params.blocks_count > 0) {
    CheckLaunch(DequantizePages(params, at::cuda::getCurrentCUDAStream()), "dequantize");
  }
  return {k, v};
}

}  // namespace
}  // namespace okv::cuda

TORCH_LIBRARY(okv, library) {
  library.def(
      "decode_workspace(Tensor lengths, int query_tokens, int query_heads, int kv_heads, "
      "int head_dim, int group_size, int[] windows) -> Tensor");
  library.def(
      "plan_decode(Tensor lengths, Tensor(a!) workspace, int query_tokens, int query_heads, "
      "int kv_heads, int head_dim, int group_size, int[] windows) -> ()");
  library.def(
      "attend(Tensor q, Tensor r_k, Tensor r_v, Tensor int2_pages, Tensor int2_table, "
      "Tensor bf16_blocks, Tensor bf16_table, Tensor lengths, Tensor(a!) workspace, "
      "int group_size, int[] windows, float softmax_scale, float logit_softcap=0.0, "
      "Tensor? sink_logits=None, bool early_history=False) -> (Tensor, Tensor)");
  library.def(
      "quantize(Tensor k, Tensor v, Tensor r_k, Tensor r_v, Tensor? clip_k, Tensor? clip_v, "
      "Tensor(a!) pages, Tensor table, int group_size) -> Tensor");
  library.def(
      "dequantize(Tensor pages, Tensor table, int head_dim, int group_size, Tensor? r_k=None, "
      "Tensor? r_v=None) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(okv, CUDA, library) {
  library.impl("decode_workspace", okv::cuda::DecodeWorkspace);
  library.impl("plan_decode", okv::cuda::PlanDecodeOp);
  library.impl("attend", okv::cuda::AttendOp);
  library.impl("quantize", okv::cuda::QuantizeOp);
  library.impl("dequantize", okv::cuda::DequantizeOp);
}

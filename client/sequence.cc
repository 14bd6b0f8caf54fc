#include "client/sequence.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/quantize.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Uninitialised bytes: a vector would clear megabytes that are written right afterwards.
class BlockBuffer {
 public:
  uint8_t* Ensure(size_t bytes) {
    if (data_ == nullptr) data_.reset(new uint8_t[bytes]);
    return data_.get();
  }
  uint8_t* get() const { return data_.get(); }

 private:
  std::unique_ptr<uint8_t[]> data_;
};

bool IsFinite(uint16_t bf16) { return (bf16 & 0x7f80u) != 0x7f80u; }

}  // namespace

struct Sequence::State {
  SequenceOptions options;
  PageLayout layout;
  const RotationSet* rotations;
  ThreadPool* pool;
  uint32_t sink_blocks;    // S
  uint32_t recent_blocks;  // W
  uint32_t ring_slots;     // W + 1, or every block when the sequence is shorter than that.

  // Each buffer holds one block of every layer: a layer owns its page of it, and layers may be many
  // blocks apart while a prefill chunk is under way.
  std::vector<BlockBuffer> sink;     // [sink_blocks]
  std::vector<BlockBuffer> ring;     // [ring_slots], block j in slot j % ring_slots
  std::vector<BlockBuffer> history;  // [blocks_max], int2

  std::vector<uint32_t> layer_tokens;  // [layers]
  std::vector<uint32_t> layer_sealed;  // [layers]: int2 blocks sink_blocks..sealed-1 exist.
  uint32_t resume_boundary = 0;
  bool resuming = false;
  absl::Status failure;           // Set for good when rows could not be stored.
  std::vector<AttendBlock> view;  // Scratch of Append.

  uint8_t* Bf16Page(uint32_t block, uint32_t layer) {
    BlockBuffer& buffer = block < sink_blocks ? sink[block] : ring[block % ring_slots];
    return buffer.Ensure(layout.block_bytes(Codec::kBf16)) +
           layout.page_bytes(Codec::kBf16) * layer;
  }
  uint8_t* Int2Page(uint32_t block, uint32_t layer) {
    return history[block].Ensure(layout.block_bytes(Codec::kInt2)) +
           layout.page_bytes(Codec::kInt2) * layer;
  }

  uint32_t tokens_count() const {
    return *std::min_element(layer_tokens.begin(), layer_tokens.end());
  }

  absl::Status SealPage(uint32_t layer, uint32_t block, const uint8_t* bf16_page,
                        uint8_t* int2_page) const;
  absl::Status Demote(uint32_t layer, uint32_t block);
  absl::Status StoreRows(const AppendRows& rows, uint32_t first, uint32_t count);
  absl::Status AttendRows(const AppendRows& rows, uint32_t first, uint32_t count);
  absl::Status AppendTile(const AppendRows& rows, uint32_t first, uint32_t count);
  // kNotFound unless `index` is a full block whose bf16 rows are still here.
  absl::Status CheckBf16Resident(BlockIndex index) const;
};

absl::Status SequenceOptions::Validate() const {
  OKV_RETURN_IF_ERROR(format.Validate());
  if (query_heads == 0 || query_heads % format.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "query_heads ", query_heads, " is not a multiple of kv_heads ", format.kv_heads));
  }
  if (!(softmax_scale > 0)) return absl::InvalidArgumentError("softmax_scale must be positive");
  if (tokens_max == 0 || tokens_max > kSequenceTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens_max ", tokens_max, " is not 1 to ", kSequenceTokensMax));
  }
  return absl::OkStatus();
}

Sequence::Sequence(std::unique_ptr<State> state) : state_(std::move(state)) {}
Sequence::~Sequence() = default;

absl::StatusOr<std::unique_ptr<Sequence>> Sequence::Create(const SequenceOptions& options,
                                                           const RotationSet* rotations,
                                                           ThreadPool* pool) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_RETURN_IF_ERROR(rotations->CheckMatches(options.format));
  if (options.drift != nullptr && options.drift->rotations() != rotations) {
    return absl::InvalidArgumentError("drift is the monitor of another rotation set");
  }
  auto state = std::make_unique<State>();
  state->options = options;
  state->layout = PageLayout::Of(options.format);
  state->rotations = rotations;
  state->pool = pool;
  state->sink_blocks = options.format.sink_blocks();
  state->recent_blocks = options.format.recent_blocks();
  const uint32_t blocks_max = (options.tokens_max + kBlockTokens - 1) / kBlockTokens;
  state->ring_slots = std::min(state->recent_blocks + 1, blocks_max);
  state->sink.resize(state->sink_blocks);
  state->ring.resize(state->ring_slots);
  state->history.resize(blocks_max);
  state->layer_tokens.resize(state->layout.layers_count);
  state->layer_sealed.assign(state->layout.layers_count, state->sink_blocks);
  return std::unique_ptr<Sequence>(new Sequence(std::move(state)));
}

absl::Status Sequence::State::SealPage(uint32_t layer, uint32_t block, const uint8_t* bf16_page,
                                       uint8_t* int2_page) const {
  for (uint32_t head = 0; head < layout.kv_heads; ++head) {
    const uint8_t* run = bf16_page + layout.run_bytes(Codec::kBf16) * head;
    const size_t clip = size_t{layer} * layout.kv_heads + head;
    BadRow bad;
    const absl::Status status =
        QuantizeRun({.k = reinterpret_cast<const uint16_t*>(run),
                     .v = reinterpret_cast<const uint16_t*>(run + layout.bf16_v_offset()),
                     .row_stride = layout.head_dim,
                     .dim = layout.head_dim,
                     .group_size = layout.group_size,
                     .clip_rank_k = rotations->clip_rank_k[clip],
                     .clip_rank_v = rotations->clip_rank_v[clip]},
                    int2_page + layout.run_bytes(Codec::kInt2) * head, &bad);
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(bad.is_value ? "V" : "K", " of layer ", options.format.layer_ids[layer],
                       ", token ", block * kBlockTokens + bad.token, ", head ", head, ": ",
                       absl::string_view(status.message())));
    }
  }
  return absl::OkStatus();
}

absl::Status Sequence::State::Demote(uint32_t layer, uint32_t block) {
  OKV_CHECK(block >= sink_blocks && block == layer_sealed[layer]);
  const uint8_t* const bf16_page = Bf16Page(block, layer);
  uint8_t* const int2_page = Int2Page(block, layer);
  OKV_RETURN_IF_ERROR(SealPage(layer, block, bf16_page, int2_page));
  ++layer_sealed[layer];
  if (options.drift != nullptr) {
    options.drift->Measure({.layer = layer,
                            .block = block,
                            .salt = options.drift_salt,
                            .bf16_page = bf16_page,
                            .int2_page = int2_page});
  }
  return absl::OkStatus();
}

absl::Status Sequence::State::StoreRows(const AppendRows& rows, uint32_t first, uint32_t count) {
  const uint32_t position = layer_tokens[rows.layer];
  const uint32_t slot = position % kBlockTokens;
  uint8_t* page = Bf16Page(position / kBlockTokens, rows.layer);
  const size_t row_stride = size_t{layout.kv_heads} * layout.head_dim;
  for (uint32_t head = 0; head < layout.kv_heads; ++head) {
    for (const bool is_value : {false, true}) {
      const uint16_t* x =
          (is_value ? rows.v : rows.k) + first * row_stride + size_t{head} * layout.head_dim;
      auto* y = reinterpret_cast<uint16_t*>(page + layout.run_bytes(Codec::kBf16) * head +
                                            (is_value ? layout.bf16_v_offset() : 0)) +
                size_t{slot} * layout.head_dim;
      RotateRows({.x = x,
                  .x_stride = row_stride,
                  .r = is_value ? rotations->RotationV(rows.layer, head)
                                : rotations->RotationK(rows.layer, head),
                  .rows_count = count,
                  .dim = layout.head_dim},
                 y, layout.head_dim);
      for (size_t i = 0; i < size_t{count} * layout.head_dim; ++i) {
        if (IsFinite(y[i])) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("NaN or Inf in ", is_value ? "V" : "K", " of layer ",
                         options.format.layer_ids[rows.layer], ", token ",
                         position + i / layout.head_dim, ", head ", head));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Sequence::State::AttendRows(const AppendRows& rows, uint32_t first, uint32_t count) {
  const uint32_t position = layer_tokens[rows.layer];
  const uint32_t block = position / kBlockTokens;
  view.clear();
  for (uint32_t j = 0; j <= block; ++j) {
    const bool bf16 = j < sink_blocks || j + recent_blocks >= block;
    if (!bf16) OKV_CHECK(j < layer_sealed[rows.layer]);
    view.push_back({.codec = bf16 ? Codec::kBf16 : Codec::kInt2,
                    .page = bf16 ? Bf16Page(j, rows.layer) : Int2Page(j, rows.layer)});
  }
  const size_t row = size_t{options.query_heads} * layout.head_dim;
  return Attend({.query_heads = options.query_heads,
                 .kv_heads = layout.kv_heads,
                 .head_dim = layout.head_dim,
                 .group_size = layout.group_size,
                 .softmax_scale = options.softmax_scale,
                 .q = rows.q + first * row,
                 .r_k = rotations->RotationK(rows.layer, 0),
                 .r_v = rotations->RotationV(rows.layer, 0),
                 .rotation_heads = rotations->rotation_heads,
                 .queries_count = count,
                 .blocks = view,
                 .last_block_tokens = position % kBlockTokens + 1,
                 .out = rows.out + first * row},
                pool);
}

absl::Status Sequence::State::AppendTile(const AppendRows& rows, uint32_t first, uint32_t count) {
  const uint32_t position = layer_tokens[rows.layer];
  const uint32_t block = position / kBlockTokens;
  // The one moment of demotion: the first token of block b takes the ring slot of b - W - 1.
  if (position % kBlockTokens == 0 && block >= sink_blocks + recent_blocks + 1) {
    const uint32_t oldest = block - recent_blocks - 1;
    if (oldest >= layer_sealed[rows.layer]) OKV_RETURN_IF_ERROR(Demote(rows.layer, oldest));
  }
  OKV_RETURN_IF_ERROR(StoreRows(rows, first, count));
  OKV_RETURN_IF_ERROR(AttendRows(rows, first, count));
  layer_tokens[rows.layer] += count;
  return absl::OkStatus();
}

absl::Status Sequence::Append(const AppendRows& rows) {
  State& state = *state_;
  if (!state.failure.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the sequence failed before: ", absl::string_view(state.failure.message())));
  }
  if (state.resuming) return absl::FailedPreconditionError("FinishResume has not been called");
  if (rows.layer >= state.layout.layers_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", rows.layer, " of ", state.layout.layers_count));
  }
  if (rows.tokens_count > state.options.tokens_max - state.layer_tokens[rows.layer]) {
    return absl::ResourceExhaustedError(absl::StrCat("tokens_max ", state.options.tokens_max,
                                                     " reached: ", state.layer_tokens[rows.layer],
                                                     " held, ", rows.tokens_count, " more asked"));
  }
  for (uint32_t first = 0; first < rows.tokens_count;) {
    const uint32_t slot = state.layer_tokens[rows.layer] % kBlockTokens;
    const uint32_t count = std::min(kBlockTokens - slot, rows.tokens_count - first);
    if (absl::Status status = state.AppendTile(rows, first, count); !status.ok()) {
      state.failure = status;
      return status;
    }
    first += count;
  }
  return absl::OkStatus();
}

uint32_t Sequence::tokens_count() const { return state_->tokens_count(); }

absl::StatusOr<absl::Span<const uint8_t>> Sequence::Int2Block(BlockIndex index) const {
  const State& state = *state_;
  const uint32_t sealed = *std::min_element(state.layer_sealed.begin(), state.layer_sealed.end());
  if (index.value() < state.sink_blocks || index.value() >= sealed) {
    return absl::NotFoundError(absl::StrCat("block ", index.value(),
                                            " is not sealed: int2 blocks are ", state.sink_blocks,
                                            " to ", sealed, ", exclusive"));
  }
  return absl::Span<const uint8_t>(state.history[index.value()].get(),
                                   state.layout.block_bytes(Codec::kInt2));
}

absl::Status Sequence::State::CheckBf16Resident(BlockIndex index) const {
  const uint32_t tokens = tokens_count();
  const bool full = index.value() < tokens / kBlockTokens;
  const uint32_t newest = tokens == 0 ? 0 : (tokens - 1) / kBlockTokens;
  const bool resident = index.value() < sink_blocks || newest - index.value() < ring_slots;
  if (full && resident) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("block ", index.value(), full ? " has left the ring" : " is not full"));
}

absl::Status Sequence::CopyBf16Block(BlockIndex index, absl::Span<uint8_t> payload) const {
  State& state = *state_;
  OKV_CHECK(payload.size() == state.layout.block_bytes(Codec::kBf16));
  OKV_RETURN_IF_ERROR(state.CheckBf16Resident(index));
  std::memcpy(payload.data(), state.Bf16Page(index.value(), 0), payload.size());
  return absl::OkStatus();
}

absl::Status Sequence::SealBlock(BlockIndex index, absl::Span<uint8_t> payload) const {
  State& state = *state_;
  OKV_CHECK(payload.size() == state.layout.block_bytes(Codec::kInt2));
  if (auto sealed = Int2Block(index); sealed.ok()) {
    std::memcpy(payload.data(), sealed->data(), payload.size());
    return absl::OkStatus();
  }
  OKV_RETURN_IF_ERROR(state.CheckBf16Resident(index));
  for (uint32_t layer = 0; layer < state.layout.layers_count; ++layer) {
    OKV_RETURN_IF_ERROR(
        state.SealPage(layer, index.value(), state.Bf16Page(index.value(), layer),
                       payload.data() + state.layout.page_bytes(Codec::kInt2) * layer));
  }
  return absl::OkStatus();
}

absl::Status Sequence::StartResume(BlockIndex boundary) {
  State& state = *state_;
  OKV_CHECK(tokens_count() == 0);
  if (uint64_t{boundary.value()} * kBlockTokens > state.options.tokens_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "boundary ", boundary.value(), " lies beyond tokens_max ", state.options.tokens_max));
  }
  state.resume_boundary = boundary.value();
  state.resuming = true;
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<uint8_t>> Sequence::ResumeBuffer(BlockIndex index, Codec codec) {
  State& state = *state_;
  const uint32_t block = index.value();
  const bool bf16 =
      block < state.sink_blocks || block + state.recent_blocks >= state.resume_boundary;
  if (!state.resuming || block >= state.resume_boundary || bf16 != (codec == Codec::kBf16)) {
    return absl::InvalidArgumentError(absl::StrCat("resume at boundary ", state.resume_boundary,
                                                   " takes no ", CodecName(codec), " block ",
                                                   block));
  }
  return absl::Span<uint8_t>(bf16 ? state.Bf16Page(block, 0) : state.Int2Page(block, 0),
                             state.layout.block_bytes(codec));
}

absl::Status Sequence::FinishResume() {
  State& state = *state_;
  if (!state.resuming) return absl::FailedPreconditionError("StartResume has not been called");
  state.resuming = false;
  const uint32_t boundary = state.resume_boundary;
  const uint32_t sealed = boundary > state.recent_blocks ? boundary - state.recent_blocks : 0;
  std::fill(state.layer_tokens.begin(), state.layer_tokens.end(), boundary * kBlockTokens);
  std::fill(state.layer_sealed.begin(), state.layer_sealed.end(),
            std::max(sealed, state.sink_blocks));
  return absl::OkStatus();
}

const PageLayout& Sequence::layout() const { return state_->layout; }

}  // namespace okv

#ifndef OKV_CALIB_DUMP_H_
#define OKV_CALIB_DUMP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "calib/attention.h"
#include "kernels/thread_pool.h"

namespace okv {

// A calibration dump is a directory. Ours has one safetensors file a layer, layer_<id>.safetensors:
//   q         [tokens, query_heads, head_dim] BF16 or F32, post-RoPE
//   k         [tokens, kv_heads, head_dim]    BF16 or F32, post-RoPE
//   v         [tokens, kv_heads, head_dim]    BF16 or F32
//   seq_lens  [sequences]                     I32, U32 or I64; they sum to tokens
//   __metadata__: model, weights_revision, text_source, layer (this file's id), layer_ids (all ids
//   of the dump, ascending, joined by commas: how a reader knows that no file is missing)
// Two more layouts are read, and not written; neither says model or revision (DumpNames):
//   layer_<id>/{q,k,v,seq_lens}/<n>.pt: tensors of torch.save as above, one of each kind for every
//     batch of a prefill, n counting up; q, k, v of Float, BFloat16 or Half, seq_lens of Int or
//     Long. What the OSCAR project's engine dumps. A sequence does not reach over files.
//   layer_<id>_{q,k,v}.npy, seq_lens.npy: arrays of numpy.save as above, of the types of npy.h.
// All layers hold the same tokens.

// What a dump is of. A plain value.
struct DumpInfo {
  std::string model;
  std::string weights_revision;
  std::string text_source;          // For people.
  std::vector<uint32_t> layer_ids;  // Ascending.
  uint32_t query_heads = 0;         // A multiple of kv_heads.
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;  // 64, 128 or 256

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
  bool operator==(const DumpInfo&) const = default;
};

// What a dump is of, told by who reads it. A plain value.
struct DumpNames {
  std::string model;
  std::string weights_revision;
};

// Post-RoPE rows of consecutive tokens of one layer.
struct DumpRows {
  uint32_t layer;  // 0-based position in layer_ids.
  uint32_t tokens_count;
  const float* q;     // [tokens_count, query_heads, head_dim]; stored as bf16
  const uint16_t* k;  // [tokens_count, kv_heads, head_dim] bf16
  const uint16_t* v;  // [tokens_count, kv_heads, head_dim] bf16
};

// Writes a dump. Rows go to spool files beside the result as they arrive, so memory stays at one
// Append; Finish joins them. Thread-compatible. An unfinished dump is removed on destruction.
class DumpWriter {
 public:
  // Makes the directory if need be. kInvalidArgument: info. kAlreadyExists: the directory holds a
  // dump or parts of one. Otherwise the errno's status.
  static absl::StatusOr<std::unique_ptr<DumpWriter>> Create(const std::string& directory,
                                                            const DumpInfo& info);
  ~DumpWriter();
  DumpWriter(const DumpWriter&) = delete;
  DumpWriter& operator=(const DumpWriter&) = delete;

  // Layers may advance in any order inside one sequence. kResourceExhausted: the disk is full.
  // After an error the writer is good for nothing but destruction.
  absl::Status Append(const DumpRows& rows);

  // The rows since the last call are one sequence: later ones do not attend to them. No rows: no
  // effect. kFailedPrecondition when the layers do not have equally many rows.
  absl::Status EndSequence();

  // Ends the open sequence and puts the files in place. kFailedPrecondition: as EndSequence, or no
  // tokens at all.
  absl::Status Finish();

 private:
  DumpWriter(std::string directory, const DumpInfo& info);
  std::string SpoolPath(uint32_t layer_id, const char* tensor) const;
  absl::Status JoinLayer(uint32_t layer_id) const;
  void RemoveSpools(uint32_t layer_id) const;

  const std::string directory_;
  const DumpInfo info_;
  std::vector<uint64_t> layer_tokens_;  // Appended so far, by position in layer_ids.
  std::vector<uint32_t> sequence_lengths_;
  uint64_t ended_tokens_ = 0;  // The sum of sequence_lengths_.
};

// One layer in memory, fp32. A plain value.
struct LayerDump {
  uint32_t layer_id = 0;
  uint32_t tokens_count = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  std::vector<uint32_t> sequence_lengths;  // Sums to tokens_count.
  std::vector<float> q;                    // [tokens_count, query_heads, head_dim]
  std::vector<float> k;                    // [tokens_count, kv_heads, head_dim]
  std::vector<float> v;                    // [tokens_count, kv_heads, head_dim]

  // Query head `query_head`, one of `group` that share a KV head, over a range of tokens.
  AttentionHead Head(uint32_t first_token, uint32_t range_tokens, uint32_t query_head,
                     uint32_t group) const;
};

class DumpLayer;
struct DumpLayerSource;

// Reads a dump layer by layer: memory is bounded by one layer and one file. Thread-compatible.
class DumpReader {
 public:
  // Checks every file's header, so that a bad dump fails before the work starts. `names` is needed
  // where the layout does not say them; where it does, those given must be the same. kNotFound: no
  // directory, no layer, a layer of layer_ids or a part of a layer without its file. kDataLoss: a
  // truncated file. kInvalidArgument naming file and thing: another kind of file, layers of two
  // layouts, a tensor, field or name missing, a wrong dtype or shape, heads that do not divide.
  // kFailedPrecondition: layers that differ in geometry, tokens, sequences, model or revision.
  static absl::StatusOr<DumpReader> Open(const std::string& directory, const DumpNames& names = {});
  DumpReader(DumpReader&&) noexcept;
  ~DumpReader();

  const DumpInfo& info() const { return info_; }
  uint32_t tokens_count() const { return tokens_count_; }
  const std::vector<uint32_t>& sequence_lengths() const { return sequence_lengths_; }

  // Reads layer info().layer_ids[position]. kInvalidArgument naming layer, tensor, token and head
  // of the first NaN or Inf; kDataLoss naming the file whose checksum does not match; otherwise as
  // Open, should a file have changed. The second takes `layer`'s memory for it, whatever it held:
  // pages that are new to the process take longer than reading. `layer` is unspecified on errors.
  absl::StatusOr<LayerDump> ReadLayer(uint32_t position) const;
  absl::Status ReadLayer(uint32_t position, ThreadPool* pool, LayerDump* layer) const;

 private:
  explicit DumpReader(DumpLayerSource source);
  absl::StatusOr<std::unique_ptr<DumpLayer>> OpenLayer(uint32_t layer_id) const;
  absl::Status CheckSame(const DumpLayer& layer) const;

  std::unique_ptr<const DumpLayerSource> source_;
  DumpInfo info_;
  uint32_t tokens_count_ = 0;
  std::vector<uint32_t> sequence_lengths_;
};

}  // namespace okv

#endif  // OKV_CALIB_DUMP_H_

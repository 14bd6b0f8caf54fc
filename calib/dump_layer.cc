#include "calib/dump_layer.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace okv {
namespace {

constexpr absl::string_view kPrefix = "layer_";

// What marks a layer in the directory.
struct Mark {
  DumpLayout layout;
  absl::string_view suffix;
  bool is_folder;
};
constexpr Mark kMarks[] = {
    {DumpLayout::kSafetensors, ".safetensors", false},
    // Each of the three marks it, so that a layer is not lost with one of them. LayerPath gives the
    // first.
    {DumpLayout::kNumpy, "_q.npy", false},
    {DumpLayout::kNumpy, "_k.npy", false},
    {DumpLayout::kNumpy, "_v.npy", false},
    {DumpLayout::kTorch, "", true},
};

// The layer's id in its only spelling: "layer_03" beside "layer_3" would be a second layer 3.
absl::StatusOr<uint32_t> LayerId(absl::string_view text) {
  uint32_t id = 0;
  if (!absl::SimpleAtoi(text, &id) || absl::StrCat(id) != text) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a layer id"));
  }
  return id;
}

}  // namespace

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

std::string LayerPath(const std::string& directory, DumpLayout layout, uint32_t layer_id) {
  const Mark* mark = std::find_if(std::begin(kMarks), std::end(kMarks),
                                  [&](const Mark& one) { return one.layout == layout; });
  return absl::StrCat(directory, "/", kPrefix, layer_id, mark->suffix);
}

absl::StatusOr<DumpListing> ListDump(const std::string& directory) {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  const auto cannot_read = [&] {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read the dump ", directory));
  };
  if (error) return cannot_read();
  DumpListing listing{.layout = DumpLayout::kSafetensors, .layer_ids = {}};
  for (const std::filesystem::directory_iterator end; entries != end; entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    std::error_code ignored;  // What cannot be looked at is no folder.
    const bool is_folder = entries->is_directory(ignored);
    for (const Mark& mark : kMarks) {
      absl::string_view id = name;
      if (is_folder != mark.is_folder || !absl::ConsumePrefix(&id, kPrefix) ||
          !absl::ConsumeSuffix(&id, mark.suffix)) {
        continue;
      }
      const absl::StatusOr<uint32_t> parsed = LayerId(id);
      if (!parsed.ok()) return InFile(absl::StrCat(directory, "/", name), parsed.status());
      if (!listing.layer_ids.empty() && mark.layout != listing.layout) {
        return absl::InvalidArgumentError(
            absl::StrCat(LayerPath(directory, listing.layout, listing.layer_ids[0]), " and ",
                         directory, "/", name, " are layers of two layouts in one dump"));
      }
      listing.layout = mark.layout;
      listing.layer_ids.push_back(*parsed);
      break;
    }
    if (error) return cannot_read();
  }
  if (error) return cannot_read();
  if (listing.layer_ids.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no layer_<id>.safetensors, layer_<id>_q.npy or folder "
                     "layer_<id> in the dump ",
                     directory));
  }
  std::vector<uint32_t>& ids = listing.layer_ids;
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return listing;
}

void ForEachPiece(size_t count, ThreadPool* pool, absl::FunctionRef<void(size_t, size_t)> visit) {
  constexpr size_t kPiece = size_t{1} << 20;  // 2^20 numbers of fp32 = 4 MiB.
  pool->ParallelFor((count + kPiece - 1) / kPiece, [&](size_t piece) {
    visit(piece * kPiece, std::min(count, (piece + 1) * kPiece));
  });
}

absl::Status CheckRowShape(absl::string_view name, const std::vector<uint64_t>& shape) {
  if (shape.size() == 3) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " has shape [",
                                                 absl::StrJoin(shape, ", "),
                                                 "], not [tokens, heads, head_dim]"));
}

absl::Status DumpLayer::TakeShapes(const std::array<Shape, 3>& shapes) {
  const auto& [q, k, v] = shapes;
  if (k != v || q[0] != k[0] || q[2] != k[2]) {
    return absl::InvalidArgumentError(
        absl::StrCat("shapes do not fit together: q [", absl::StrJoin(q, ", "), "], k [",
                     absl::StrJoin(k, ", "), "], v [", absl::StrJoin(v, ", "), "]"));
  }
  if (q[1] > kQueryHeadsMax || k[1] > kKvHeadsMax || q[2] > 256 ||
      q[0] > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("q [", absl::StrJoin(q, ", "), "] is beyond the limits"));
  }
  if (q[0] == 0) return absl::InvalidArgumentError("the tensors have no tokens");
  tokens_count_ = static_cast<uint32_t>(q[0]);
  info_.query_heads = static_cast<uint32_t>(q[1]);
  info_.kv_heads = static_cast<uint32_t>(k[1]);
  info_.head_dim = static_cast<uint32_t>(q[2]);
  return absl::OkStatus();
}

absl::Status DumpLayer::TakeLengths(const std::vector<int64_t>& lengths, uint64_t tokens_count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t length = lengths[i];
    if (length <= 0 || static_cast<uint64_t>(length) > tokens_count - sum) {
      return absl::InvalidArgumentError(absl::StrCat("seq_lens[", i, "] is ", length, " with ",
                                                     tokens_count - sum, " tokens left"));
    }
    sum += static_cast<uint64_t>(length);
    sequence_lengths_.push_back(static_cast<uint32_t>(length));
  }
  if (sum != tokens_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("seq_lens sum to ", sum, ", the tensors have ", tokens_count, " tokens"));
  }
  return absl::OkStatus();
}

}  // namespace okv

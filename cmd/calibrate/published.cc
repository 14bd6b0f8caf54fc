#include "cmd/calibrate/published.h"

#include <cmath>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/files.h"
#include "calib/recover.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status CheckGiven(absl::string_view flag, const std::string& value) {
  if (!value.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is missing"));
}

// Reads one file; what it was goes into the provenance.
absl::StatusOr<PublishedRotations> ReadPublished(const std::string& path, absl::string_view which,
                                                 std::map<std::string, std::string>* provenance) {
  OKV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  absl::StatusOr<PublishedRotations> parsed = ParsePublished(file.bytes());
  if (!parsed.ok()) return InFile(path, parsed.status());
  (*provenance)[absl::StrCat(which, "_file")] = std::filesystem::path(path).filename().string();
  (*provenance)[absl::StrCat(which, "_file_sha256")] = RotationHash{Sha256(file.bytes())}.Hex();
  return parsed;
}

absl::Status WriteWhole(const std::string& path, absl::string_view bytes) {
  OKV_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  OKV_RETURN_IF_ERROR(file.Append(bytes));
  return file.Commit();
}

// A flag's name and the path that it gives.
struct FlagPath {
  absl::string_view flag;
  const std::string& path;
};

bool AreOneFile(const std::string& one, const std::string& other) {
  if (one == other) return true;
  std::error_code error;
  if (std::filesystem::equivalent(one, other, error)) return true;
  // Files that are not there yet.
  const std::filesystem::path one_path = std::filesystem::weakly_canonical(one, error);
  if (error) return false;
  const std::filesystem::path other_path = std::filesystem::weakly_canonical(other, error);
  return !error && one_path == other_path;
}

// What is written must not take the place of what was read, or of what was written before.
absl::Status CheckDistinct(const std::vector<FlagPath>& paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = i + 1; j < paths.size(); ++j) {
      if (!AreOneFile(paths[i].path, paths[j].path)) continue;
      return absl::InvalidArgumentError(absl::StrCat("--", paths[i].flag, " and --", paths[j].flag,
                                                     " are the same file, ", paths[j].path));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> BytesOfOne(const std::string& path, const PublishedRotations& rotations,
                                       PublishedVersion version, uint32_t kv_heads) {
  absl::StatusOr<std::string> bytes =
      WritePublished(rotations, version, kv_heads, std::filesystem::path(path).stem().string());
  if (!bytes.ok()) return InFile(path, bytes.status());
  return bytes;
}

}  // namespace

absl::StatusOr<Json> ImportFiles(const ImportPaths& paths, const ImportOptions& options) {
  OKV_RETURN_IF_ERROR(CheckGiven("k_file", paths.k_file));
  OKV_RETURN_IF_ERROR(CheckGiven("v_file", paths.v_file));
  OKV_RETURN_IF_ERROR(CheckGiven("model", options.model));
  OKV_RETURN_IF_ERROR(CheckGiven("weights_revision", options.weights_revision));
  OKV_RETURN_IF_ERROR(CheckGiven("out", paths.out));
  OKV_RETURN_IF_ERROR(
      CheckDistinct({{"k_file", paths.k_file}, {"v_file", paths.v_file}, {"out", paths.out}}));
  std::map<std::string, std::string> provenance = {{"program", "okv-calibrate import"},
                                                   {"clip_k", absl::StrCat(options.clip_k)},
                                                   {"clip_v", absl::StrCat(options.clip_v)}};
  OKV_ASSIGN_OR_RETURN(PublishedRotations k, ReadPublished(paths.k_file, "k", &provenance));
  OKV_ASSIGN_OR_RETURN(PublishedRotations v, ReadPublished(paths.v_file, "v", &provenance));
  absl::StatusOr<SourcedSet> imported = ImportPublished(std::move(k), std::move(v), options);
  if (!imported.ok()) {
    return InFile(absl::StrCat(paths.k_file, " and ", paths.v_file), imported.status());
  }
  imported->set.provenance = std::move(provenance);
  OKV_RETURN_IF_ERROR(WriteWhole(paths.out, SerializeSourced(*imported)));
  const RotationSet& set = imported->set;
  return Json{{"out", paths.out},
              {"hash", set.hash().Hex()},
              {"method", set.method},
              {"layers", set.layer_ids.size()},
              {"kv_heads", set.kv_heads},
              {"head_dim", set.head_dim},
              {"group_size", set.group_size},
              {"rotation_heads", set.rotation_heads},
              {"clip_rank_k", set.clip_rank_k[0]},
              {"clip_rank_v", set.clip_rank_v[0]}};
}

absl::StatusOr<Json> ExportFiles(const ExportPaths& paths, PublishedVersion version) {
  OKV_RETURN_IF_ERROR(CheckGiven("set", paths.set));
  OKV_RETURN_IF_ERROR(CheckGiven("k_out", paths.k_out));
  OKV_RETURN_IF_ERROR(CheckGiven("v_out", paths.v_out));
  OKV_RETURN_IF_ERROR(
      CheckDistinct({{"set", paths.set}, {"k_out", paths.k_out}, {"v_out", paths.v_out}}));
  OKV_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(paths.set));
  const absl::StatusOr<SourcedSet> set = ParseSourced(file.bytes());
  if (!set.ok()) return InFile(paths.set, set.status());
  const RotationSource source = SourceOf(*set);
  // Both before either is written: half of an export is of no use.
  OKV_ASSIGN_OR_RETURN(const std::string k_bytes,
                       BytesOfOne(paths.k_out, source.k, version, set->set.kv_heads));
  OKV_ASSIGN_OR_RETURN(const std::string v_bytes,
                       BytesOfOne(paths.v_out, source.v, version, set->set.kv_heads));
  OKV_RETURN_IF_ERROR(WriteWhole(paths.k_out, k_bytes));
  OKV_RETURN_IF_ERROR(WriteWhole(paths.v_out, v_bytes));
  return Json{{"k_out", paths.k_out},
              {"v_out", paths.v_out},
              {"format", static_cast<int>(version)},
              {"layers", set->set.layer_ids.size()},
              {"numbers", set->source.has_value() ? "fp32 as imported" : "bf16 as served"}};
}

absl::Status AddSourceFacts(const SourcedSet& set, uint32_t rotary_dim, Json* json) {
  const uint32_t head_dim = set.set.head_dim;
  const RopePairs pairs = {.head_dim = head_dim,
                           .rotary_dim = rotary_dim > 0 ? rotary_dim : head_dim};
  if (pairs.rotary_dim < 16 || pairs.rotary_dim > head_dim || pairs.rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rotary_dim is ", rotary_dim, ", not an even number from 16 to head_dim ", head_dim));
  }
  if (!set.source.has_value()) return absl::OkStatus();
  const PublishedRotations& k = set.source->k;
  (*json)["source_objective_k"] = k.objective;
  (*json)["source_objective_v"] = set.source->v.objective;
  if (!IsRecoverable(k)) return absl::OkStatus();
  double sum = 0;
  std::vector<double> layers;
  for (size_t layer = 0; layer < k.layer_ids.size(); ++layer) {
    double asymmetry = 0;
    for (uint32_t head = 0; head < k.heads; ++head) {
      const Matrix c_q =
          RecoverCovariance(k.Rotation(layer, head), k.Eigenvalues(layer, head), k.head_dim);
      asymmetry += RopePairAsymmetry(c_q, pairs) / k.heads;
    }
    sum += asymmetry;
    layers.push_back(std::round(asymmetry * 1e4) / 1e4);
  }
  (*json)["rope_pair_asymmetry"] = sum / static_cast<double>(layers.size());
  (*json)["rope_pair_asymmetry_by_layer"] = layers;
  return absl::OkStatus();
}

}  // namespace okv

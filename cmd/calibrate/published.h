#ifndef OKV_CMD_CALIBRATE_PUBLISHED_H_
#define OKV_CMD_CALIBRATE_PUBLISHED_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "calib/import.h"
#include "calib/published.h"
#include "nlohmann/json.hpp"

namespace okv {

struct ImportPaths {
  std::string k_file;
  std::string v_file;
  std::string out;
};
struct ExportPaths {
  std::string set;
  std::string k_out;
  std::string v_out;
};

// Reads two published files and writes the set of them. Gives facts for people and programs. Errors
// as ParsePublished and ImportPublished, naming the file, kInvalidArgument for a path that is not
// given or given twice, or the errno's status.
absl::StatusOr<nlohmann::ordered_json> ImportFiles(const ImportPaths& paths,
                                                   const ImportOptions& options);

// Writes a set as published files. Errors as ParseSourced and WritePublished, naming the file, and
// kInvalidArgument for a path that is not given or given twice.
absl::StatusOr<nlohmann::ordered_json> ExportFiles(const ExportPaths& paths,
                                                   PublishedVersion version);

// Adds what an imported set's source says: objectives, and RopePairAsymmetry of the recovered C_Q,
// the mean over layers and each layer's. Nothing of a set without a source. `rotary_dim` 0 is
// head_dim. kInvalidArgument: a rotary_dim that no head of the set has.
absl::Status AddSourceFacts(const SourcedSet& set, uint32_t rotary_dim,
                            nlohmann::ordered_json* json);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_PUBLISHED_H_

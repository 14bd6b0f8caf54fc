#ifndef OKV_CLIENT_PREFIX_H_
#define OKV_CLIENT_PREFIX_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cluster.h"
#include "client/sequence.h"

namespace okv {

// A hit's figures. hit_tokens = 64 * boundary; everything after it is the caller's to compute.
struct ResumeResult {
  uint32_t boundary = 0;  // 0: a miss; the sequence is still empty.
  uint32_t hit_tokens = 0;
  uint32_t fetched_objects = 0;
  uint64_t fetched_bytes = 0;
  // Why a boundary that the lookup promised was not used; OK otherwise. The sequence is empty then.
  absl::Status fetch_status;
};

// Looks up the blocks of `tokens` and, when there is a resume point before the last token, fetches
// what it needs straight into the empty `sequence`, which then continues as if it had computed
// those tokens itself. At least one token is always left to compute. A miss, a hit whose objects
// could not all be fetched, and a control plane that does not answer leave the sequence empty: go
// on without (the result says why). Other errors are those of Cluster::Lookup. `deadline` is for
// all together.
absl::StatusOr<ResumeResult> ResumePrefix(Cluster* cluster, Sequence* sequence,
                                          absl::Span<const uint32_t> tokens,
                                          absl::Duration deadline);

struct StoreResult {
  uint32_t stored_objects = 0;   // Committed by this call.
  uint32_t present_objects = 0;  // Somebody had stored them before.
  uint64_t stored_bytes = 0;     // Payload bytes of the two.
  uint64_t int2_bytes = 0;       // Of these, int2.
  uint32_t int2_objects = 0;
  std::vector<absl::Status> failures;  // One per object that could not be stored.
};

// What a boundary's resume point consists of, given what the sequence holds. One object of the
// plan.
struct PlannedObject {
  BlockIndex index;
  Codec codec;
};

// The objects of `sequence` that make `boundary` a resume point: the sink blocks and the tail as
// bf16, what lies between as int2. With `whole`, also the full blocks from the tail on, as int2
// (what a finished sequence leaves behind).
std::vector<PlannedObject> PlanStore(const Format& format, BlockIndex boundary, bool whole,
                                     uint32_t full_blocks);

// Makes one object's payload from the sequence: a copy of the bf16 rows, or the int2 block.
absl::StatusOr<std::vector<uint8_t>> MakePayload(const Sequence& sequence,
                                                 const PlannedObject& object);

// Stores the prompt's resume point: boundary floor((tokens - 1) / 64), so that a reader of the same
// prompt has a token left to compute. Call right after prefill. `write_group` names this writer.
StoreResult StorePrompt(Cluster* cluster, const Sequence& sequence,
                        absl::Span<const uint32_t> tokens, const std::string& write_group,
                        absl::Duration deadline);

// Stores a finished sequence: the resume point at its last full block, and every full block as
// int2.
StoreResult StoreFinished(Cluster* cluster, const Sequence& sequence,
                          absl::Span<const uint32_t> tokens, const std::string& write_group,
                          absl::Duration deadline);

}  // namespace okv

#endif  // OKV_CLIENT_PREFIX_H_

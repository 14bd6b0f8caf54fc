#include "proto/rotation_set.h"

#include <functional>
#include <limits>
#include <random>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "proto/safetensors.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::Rotations;
using examples::StatusIs;

struct Change {
  std::string name;
  std::function<void(RotationSet*)> apply;
};

auto Invalid(const std::string& why) {
  return StatusIs(absl::StatusCode::kInvalidArgument, absl::StrCat("rotation set: ", why));
}

// Two layers with one rotation a head: [2, 2, 64, 64].
RotationSet PerHeadRotations() {
  RotationSet set = Rotations();
  set.layer_ids = {3, 8};
  set.rotation_heads = 2;
  const std::vector<uint16_t> one = set.r_k;
  for (int copies = 1; copies < 4; ++copies) {
    set.r_k.insert(set.r_k.end(), one.begin(), one.end());
  }
  set.r_v = set.r_k;
  set.clip_rank_k = {1, 2, 3, 4};
  set.clip_rank_v = {5, 6, 7, 8};
  return set;
}

TEST(RotationSetTest, HashAndHeaderAreTheGoldenFiles) {
  golden::ExpectGolden("rotation_set_hash", "RotationSet::hash() of examples::Rotations()",
                       Rotations().hash().view());
  const std::string file = Rotations().Serialize();
  const size_t data_bytes = 2 * 64 * 64 * 2 + 2 * 2 * 4;
  golden::ExpectGolden("rotation_set_header",
                       "RotationSet::Serialize() of examples::Rotations() up to its tensors' bytes",
                       absl::string_view(file).substr(0, file.size() - data_bytes));
}

TEST(RotationSetTest, ParseReadsWhatSerializeWrote) {
  for (const RotationSet& set : {Rotations(), PerHeadRotations()}) {
    const std::string bytes = set.Serialize();
    const auto parsed = RotationSet::Parse(bytes);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, set);
    EXPECT_EQ(parsed->hash(), set.hash());
    EXPECT_EQ(parsed->Serialize(), bytes);
  }
}

TEST(RotationSetTest, PromisedErrorsTravelInTheFileAndAreNotPartOfTheHash) {
  for (const bool k_too : {false, true}) {
    RotationSet set = PerHeadRotations();
    if (k_too) set.promised_error_k = {0.25f, 0};
    set.promised_error_v = {0.125f, 0.0625f};
    EXPECT_EQ(set.hash(), PerHeadRotations().hash());
    const auto parsed = RotationSet::Parse(set.Serialize());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, set);
  }
}

TEST(RotationSetTest, ValidateNamesAPromisedErrorThatIsNone) {
  RotationSet set = PerHeadRotations();
  set.promised_error_k = {0.5f};
  EXPECT_THAT(set.Validate(), Invalid("tensor 'promised_error_k' has the wrong size"));
  set.promised_error_k = {0.5f, -0.5f};
  EXPECT_THAT(set.Validate(), Invalid("promised_error_k of layer 8 is -0.5"));
  set.promised_error_k.clear();
  set.promised_error_v = {std::numeric_limits<float>::quiet_NaN(), 0.5f};
  EXPECT_THAT(set.Validate(), Invalid("promised_error_v of layer 3 is nan"));
  set.promised_error_v = {0.5f, std::numeric_limits<float>::infinity()};
  EXPECT_THAT(set.Validate(), Invalid("promised_error_v of layer 8 is inf"));
}

TEST(RotationSetTest, RotationsAreFoundByLayerAndHead) {
  const RotationSet shared = Rotations();
  EXPECT_EQ(shared.RotationK(0, 1), shared.r_k.data());
  const RotationSet per_head = PerHeadRotations();
  EXPECT_EQ(per_head.RotationK(0, 1), per_head.r_k.data() + 64 * 64);
  EXPECT_EQ(per_head.RotationV(1, 1), per_head.r_v.data() + 3 * 64 * 64);
}

TEST(RotationSetTest, EverythingButPromisesAndProvenanceChangesTheHash) {
  const std::vector<Change> changes = {
      {"model", [](RotationSet* s) { s->model = "other"; }},
      {"weights_revision", [](RotationSet* s) { s->weights_revision = "r2"; }},
      {"layer_ids", [](RotationSet* s) { s->layer_ids = {1}; }},
      {"kv_heads", [](RotationSet* s) { s->kv_heads = 1; }},
      {"head_dim", [](RotationSet* s) { s->head_dim = 128; }},
      {"group_size", [](RotationSet* s) { s->group_size = 64; }},
      {"rotation_heads", [](RotationSet* s) { s->rotation_heads = 2; }},
      {"method", [](RotationSet* s) { s->method = "none"; }},
      {"r_k", [](RotationSet* s) { s->r_k[5] ^= 1; }},
      {"r_v", [](RotationSet* s) { s->r_v[5] ^= 1; }},
      {"clip_rank_k", [](RotationSet* s) { s->clip_rank_k[1] ^= 1; }},
      {"clip_rank_v", [](RotationSet* s) { s->clip_rank_v[1] ^= 1; }},
      {"ranks exchanged", [](RotationSet* s) { std::swap(s->clip_rank_k, s->clip_rank_v); }},
  };
  std::set<RotationHash> hashes = {Rotations().hash()};
  for (const Change& change : changes) {
    RotationSet set = Rotations();
    change.apply(&set);
    EXPECT_TRUE(hashes.insert(set.hash()).second) << change.name;
  }
  RotationSet set = Rotations();
  set.provenance["date"] = "today";
  EXPECT_EQ(set.hash(), Rotations().hash());
}

TEST(RotationSetTest, ValidateNamesTheFieldThatIsWrong) {
  const std::vector<Change> changes = {
      {"field 'model' is missing", [](RotationSet* s) { s->model.clear(); }},
      {"field 'model' is not UTF-8", [](RotationSet* s) { s->model = std::string("\x80"); }},
      {"field 'weights_revision' is missing", [](RotationSet* s) { s->weights_revision.clear(); }},
      {"field 'weights_revision' is longer",
       [](RotationSet* s) { s->weights_revision = std::string(4097, 'r'); }},
      {"field 'method' is missing", [](RotationSet* s) { s->method.clear(); }},
      {"field 'layer_ids' has 0", [](RotationSet* s) { s->layer_ids.clear(); }},
      {"field 'layer_ids' is not ascending",
       [](RotationSet* s) {
         s->layer_ids = {1, 1};
       }},
      {"field 'kv_heads' is 0", [](RotationSet* s) { s->kv_heads = 0; }},
      {"field 'kv_heads' is 257", [](RotationSet* s) { s->kv_heads = 257; }},
      {"field 'head_dim' is 32", [](RotationSet* s) { s->head_dim = 32; }},
      {"field 'group_size' is 16", [](RotationSet* s) { s->group_size = 16; }},
      {"field 'group_size' is 48", [](RotationSet* s) { s->group_size = 48; }},
      {"field 'group_size' is 128", [](RotationSet* s) { s->group_size = 128; }},
      {"field 'rotation_heads' is 0", [](RotationSet* s) { s->rotation_heads = 0; }},
      {"field 'rotation_heads' is 3", [](RotationSet* s) { s->rotation_heads = 3; }},
      {"tensor 'r_k' has", [](RotationSet* s) { s->r_k.pop_back(); }},
      {"tensor 'r_v' has", [](RotationSet* s) { s->r_v.push_back(0); }},
      {"tensor 'clip_rank_k' has", [](RotationSet* s) { s->clip_rank_k.pop_back(); }},
      {"tensor 'clip_rank_v' has", [](RotationSet* s) { s->clip_rank_v.push_back(0); }},
      {"a name in 'provenance'", [](RotationSet* s) { s->provenance["\xff"] = "x"; }},
  };
  EXPECT_TRUE(Rotations().Validate().ok());
  EXPECT_TRUE(PerHeadRotations().Validate().ok());
  for (const Change& change : changes) {
    RotationSet set = Rotations();
    change.apply(&set);
    EXPECT_THAT(set.Validate(), Invalid(change.name));
  }
}

TEST(RotationSetTest, ValidateNamesTensorLayerAndHeadOfWhatIsNotFinite) {
  for (const uint16_t bits : {uint16_t{0x7fc0}, uint16_t{0x7f80}, uint16_t{0xff80}}) {
    RotationSet set = PerHeadRotations();
    set.r_k[3 * 64 * 64 + 65] = bits;
    EXPECT_THAT(set.Validate(), Invalid("NaN or Inf in r_k of layer 8, head 1, row 1, column 1"));
    set = PerHeadRotations();
    set.r_v[0] = bits;
    EXPECT_THAT(set.Validate(), Invalid("NaN or Inf in r_v of layer 3, head 0, row 0, column 0"));
  }
}

TEST(RotationSetTest, ValidateNamesTheMatrixThatIsNotOrthogonal) {
  RotationSet set = PerHeadRotations();
  for (size_t i = 0; i < 64; ++i) set.r_v[64 * 64 + 64 * 9 + i] = set.r_v[64 * 64 + 64 * 5 + i];
  EXPECT_THAT(set.Validate(),
              Invalid("r_v of layer 3, head 1 is not orthogonal: rows 5 and 9 are off by 1"));
  set = Rotations();
  set.r_k[7] = FloatToBf16(3e38f);
  EXPECT_THAT(set.Validate(), Invalid("r_k of layer 0, head 0 is not orthogonal: it holds 3"));
  set = Rotations();
  set.r_k.assign(set.r_k.size(), 0);
  EXPECT_THAT(set.Validate(), Invalid("r_k of layer 0, head 0 is not orthogonal"));
}

// A row scaled by 1 + 2^-7 has |row|^2 = 1.01569, 2^-6 = 0.015625: just too far. One scaled by
// 1 - 2^-8 has 0.9922: near enough.
TEST(RotationSetTest, TheOrthogonalityLimitIsTwoToTheMinusSix) {
  for (const bool is_up : {true, false}) {
    RotationSet set = Rotations();
    for (size_t i = 0; i < 64; ++i) {
      set.r_k[64 + i] = static_cast<uint16_t>(set.r_k[64 + i] + (is_up ? 1 : -1));
    }
    EXPECT_EQ(set.Validate().ok(), !is_up) << set.Validate();
  }
}

TEST(RotationSetTest, ValidateNamesTheClipRankThatIsTooLarge) {
  RotationSet set = PerHeadRotations();
  set.clip_rank_k[3] = 64;
  EXPECT_THAT(set.Validate(),
              Invalid("clip_rank_k of layer 8, head 1 is 64, not below head_dim 64"));
  set = PerHeadRotations();
  set.clip_rank_v[1] = 4294967295u;
  EXPECT_THAT(set.Validate(), Invalid("clip_rank_v of layer 3, head 1 is 4294967295"));
  set.clip_rank_v[1] = 63;
  EXPECT_TRUE(set.Validate().ok());
}

TEST(RotationSetTest, EveryTruncationIsDataLoss) {
  const std::string bytes = Rotations().Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_THAT(RotationSet::Parse(absl::string_view(bytes).substr(0, size)).status(),
                StatusIs(absl::StatusCode::kDataLoss, "truncated"))
        << size;
  }
}

// The parts of a file, to be put together again otherwise.
struct Parts {
  explicit Parts(const RotationSet& set) : bytes(set.Serialize()) {
    const auto file = Safetensors::Parse(bytes);
    EXPECT_TRUE(file.ok());
    tensors = file->tensors();
    metadata = file->metadata();
  }
  absl::Status Parse() const {
    return RotationSet::Parse(WriteSafetensors(tensors, metadata)).status();
  }

  std::string bytes;
  std::map<std::string, Safetensors::Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

TEST(RotationSetTest, ParseNamesAMissingTensorOrField) {
  const Parts whole(Rotations());
  EXPECT_TRUE(whole.Parse().ok());
  for (const auto& [name, tensor] : whole.tensors) {
    Parts parts(Rotations());
    parts.tensors.erase(name);
    EXPECT_THAT(parts.Parse(), Invalid(absl::StrCat("tensor '", name, "' is missing")));
  }
  int fields_count = 0;
  for (const auto& [name, value] : whole.metadata) {
    if (absl::StartsWith(name, "provenance.")) continue;
    Parts parts(Rotations());
    parts.metadata.erase(name);
    EXPECT_THAT(parts.Parse(), Invalid(absl::StrCat("field '", name, "' is missing")));
    ++fields_count;
  }
  EXPECT_EQ(fields_count, 10);
}

TEST(RotationSetTest, ParseNamesATensorOfTheWrongKind) {
  Parts parts(Rotations());
  parts.tensors["r_k"].dtype = "F16";
  EXPECT_THAT(parts.Parse(), Invalid("tensor 'r_k' is F16 [1, 1, 64, 64], not BF16"));
  parts = Parts(Rotations());
  parts.tensors["r_v"].shape = {1, 64, 64};
  EXPECT_THAT(parts.Parse(), Invalid("tensor 'r_v' is BF16 [1, 64, 64], not BF16 [1, 1, 64, 64]"));
  parts = Parts(Rotations());
  parts.tensors["clip_rank_k"].dtype = "I32";
  EXPECT_THAT(parts.Parse(), Invalid("tensor 'clip_rank_k' is I32"));
  RotationSet promising = Rotations();
  promising.promised_error_v = {0.5f};
  parts = Parts(promising);
  parts.tensors["promised_error_v"].shape = {1, 1};
  EXPECT_THAT(parts.Parse(), Invalid("tensor 'promised_error_v' is F32 [1, 1], not F32 [1]"));
}

TEST(RotationSetTest, ParseNamesAFieldThatIsNoNumber) {
  for (const char* name : {"kv_heads", "head_dim", "group_size", "rotation_heads", "layer_ids"}) {
    for (const char* text : {"", "x", "-1", "4294967296"}) {
      Parts parts(Rotations());
      parts.metadata[name] = text;
      EXPECT_THAT(parts.Parse(), Invalid(absl::StrCat("field '", name, "' "))) << text;
    }
  }
}

TEST(RotationSetTest, ParseRejectsAnotherFileVersion) {
  Parts parts(Rotations());
  parts.metadata["okv_rotation_set"] = "2";
  EXPECT_THAT(parts.Parse(), Invalid("file version 2 is not known"));
}

TEST(RotationSetTest, ParseRejectsWhatIsNoSafetensorsFile) {
  EXPECT_THAT(RotationSet::Parse("rotations, but in some other kind of file").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "not a safetensors file"));
}

TEST(RotationSetTest, ParseValidates) {
  RotationSet set = Rotations();
  set.clip_rank_k[0] = 64;
  EXPECT_THAT(RotationSet::Parse(set.Serialize()).status(), Invalid("clip_rank_k of layer 0"));
}

TEST(RotationSetTest, AStoredHashOfOtherContentIsDataLoss) {
  Parts parts(Rotations());
  parts.metadata["rotation_hash"] = std::string(64, '0');
  EXPECT_THAT(parts.Parse(), StatusIs(absl::StatusCode::kDataLoss, "stored hash 0000"));
  // Still a rotation (a column negated), a rank still in range, another method: only the hash
  // tells.
  RotationSet set = Rotations();
  for (size_t row = 0; row < 64; ++row) set.r_k[row * 64] ^= 0x8000;
  parts = Parts(Rotations());
  const Parts negated(set);
  parts.tensors["r_k"] = negated.tensors.at("r_k");
  EXPECT_THAT(parts.Parse(), StatusIs(absl::StatusCode::kDataLoss, "stored hash"));
  parts = Parts(Rotations());
  parts.metadata["method"] = "oscar";
  EXPECT_THAT(parts.Parse(), StatusIs(absl::StatusCode::kDataLoss, "stored hash"));
}

TEST(RotationSetTest, AFlippedBitNeverGivesAnotherSet) {
  std::mt19937_64 random(examples::Seed());
  const std::string bytes = Rotations().Serialize();
  for (int i = 0; i < 3000; ++i) {
    std::string flipped = bytes;
    const size_t at = i < 2000 ? random() % 1200 % bytes.size() : random() % bytes.size();
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (random() % 8)));
    const auto parsed = RotationSet::Parse(flipped);
    if (parsed.ok()) {
      EXPECT_EQ(parsed->hash(), Rotations().hash()) << at;
    }
  }
}

TEST(RotationSetTest, CheckMatchesNamesTheFieldThatDiffers) {
  struct Case {
    std::string field;
    std::function<void(Format*)> apply;
  };
  const std::vector<Case> cases = {
      {"model", [](Format* f) { f->model = "other"; }},
      {"weights_revision", [](Format* f) { f->weights_revision = "r2"; }},
      {"layer_ids",
       [](Format* f) {
         f->layer_ids = {0, 1};
       }},
      {"kv_heads", [](Format* f) { f->kv_heads = 3; }},
      {"head_dim_k", [](Format* f) { f->head_dim_k = 128; }},
      {"group_size", [](Format* f) { f->group_size = 64; }},
      {"rotation_hash", [](Format* f) { f->rotation_hash.bytes[0] ^= 1; }},
  };
  EXPECT_TRUE(Rotations().CheckMatches(examples::ExampleFormat()).ok());
  for (const Case& entry : cases) {
    Format format = examples::ExampleFormat();
    entry.apply(&format);
    EXPECT_THAT(Rotations().CheckMatches(format),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         absl::StrCat("field '", entry.field, "' ")));
  }
}

}  // namespace
}  // namespace okv

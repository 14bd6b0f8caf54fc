#include "calib/import.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/linalg.h"
#include "calib/recover.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "proto/safetensors.h"
#include "tests/calib/torch_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

const ImportOptions kOptions = {.model = "synthetic",
                                .weights_revision = "r1",
                                .kv_heads = 2,
                                .group_size = 64,
                                .clip_k = 0.96,
                                .clip_v = 0.92};

// RandomPublished with the objective of values in the place of that of keys.
PublishedRotations RandomValues(PublishedShape shape, uint32_t seed) {
  if (shape.objective == PublishedShape().objective) shape.objective = "sst_r_h_pbr";
  return RandomPublished(shape, seed);
}

SourcedSet Imported(const PublishedShape& shape) {
  auto set = ImportPublished(RandomPublished(shape, 1), RandomValues(shape, 100), kOptions);
  EXPECT_TRUE(set.ok()) << set.status();
  return *std::move(set);
}

TEST(ImportTest, ASetServesTheRoundedRotations) {
  const PublishedRotations k = RandomPublished({}, 1);
  const PublishedRotations v = RandomValues({}, 100);
  const auto imported = ImportPublished(k, v, kOptions);
  ASSERT_TRUE(imported.ok()) << imported.status();
  const RotationSet& set = imported->set;
  EXPECT_TRUE(set.Validate().ok());
  EXPECT_EQ(set.model, "synthetic");
  EXPECT_EQ(set.weights_revision, "r1");
  EXPECT_THAT(set.layer_ids, ElementsAre(0, 3));
  EXPECT_EQ(set.kv_heads, 2u);
  EXPECT_EQ(set.head_dim, 64u);
  EXPECT_EQ(set.group_size, 64u);
  EXPECT_EQ(set.rotation_heads, 1u);
  EXPECT_EQ(set.method, "oscar");
  EXPECT_THAT(set.clip_rank_k, ElementsAre(61, 61, 61, 61));  // floor(0.96 * 64)
  EXPECT_THAT(set.clip_rank_v, Each(58u));
  ASSERT_EQ(set.r_k.size(), k.rotations.size());
  for (size_t i = 0; i < set.r_k.size(); ++i) {
    ASSERT_EQ(set.r_k[i], FloatToBf16(k.rotations[i]));
    ASSERT_EQ(set.r_v[i], FloatToBf16(v.rotations[i]));
  }
}

TEST(ImportTest, AFileGivesBackTheSourceExactly) {
  for (const bool per_head : {false, true}) {
    const SourcedSet set = Imported({.heads = per_head ? 2u : 1u, .per_head = per_head});
    const std::string bytes = SerializeSourced(set);
    const auto read = ParseSourced(bytes);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->set, set.set);
    ASSERT_TRUE(read->source.has_value());
    EXPECT_EQ(*read->source, *set.source);
    EXPECT_EQ(SerializeSourced(*read), bytes);
    // What serves reads the same file, and the source is not part of the identity.
    const auto served = RotationSet::Parse(bytes);
    ASSERT_TRUE(served.ok()) << served.status();
    EXPECT_EQ(served->hash(), set.set.hash());
  }
}

TEST(ImportTest, ImportAndExportGiveTheSameFile) {
  const PublishedRotations k = RandomPublished({}, 1);
  const PublishedRotations v = RandomValues({}, 100);
  const std::string k_bytes = *WritePublished(k, PublishedVersion::kLayer, 2, "k");
  const std::string v_bytes = *WritePublished(v, PublishedVersion::kLayer, 2, "v");
  const auto set = ImportPublished(*ParsePublished(k_bytes), *ParsePublished(v_bytes), kOptions);
  ASSERT_TRUE(set.ok()) << set.status();
  const auto read = ParseSourced(SerializeSourced(*set));
  ASSERT_TRUE(read.ok()) << read.status();
  const RotationSource source = SourceOf(*read);
  EXPECT_EQ(*WritePublished(source.k, PublishedVersion::kLayer, 2, "k"), k_bytes);
  EXPECT_EQ(*WritePublished(source.v, PublishedVersion::kLayer, 2, "v"), v_bytes);
}

TEST(ImportTest, ASetWithoutASourceKeepsItsBytesAndExportsItsOwnNumbers) {
  SourcedSet set = Imported({.objective = "hadamard"});
  set.source.reset();
  EXPECT_EQ(SerializeSourced(set), set.set.Serialize());
  const auto read = ParseSourced(SerializeSourced(set));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE(read->source.has_value());
  const RotationSource source = SourceOf(*read);
  EXPECT_EQ(source.k.objective, "hadamard");
  EXPECT_FALSE(source.k.per_head);
  EXPECT_TRUE(source.k.eigenvalues.empty());
  for (size_t i = 0; i < set.set.r_v.size(); ++i) {
    ASSERT_EQ(source.v.rotations[i], Bf16ToFloat(set.set.r_v[i]));
  }
}

TEST(ImportTest, TheMethodFollowsTheObjectives) {
  const auto method = [](const char* k, const char* v) {
    return ImportPublished(RandomPublished({.objective = k}, 1),
                           RandomPublished({.objective = v}, 2), kOptions)
        ->set.method;
  };
  EXPECT_EQ(method("hadamard", "hadamard"), "hadamard");
  EXPECT_EQ(method("hadamard", "sst_r_h_pbr"), "oscar");
  EXPECT_EQ(method("", ""), "oscar");
}

TEST(ImportTest, OnlyIdentitiesAreNoRotation) {
  PublishedRotations identity = RandomPublished({.objective = "identity"}, 1);
  const PublishedRotations random = identity;
  std::fill(identity.rotations.begin(), identity.rotations.end(), 0.0f);
  for (size_t matrix = 0; matrix < identity.layer_ids.size(); ++matrix) {
    for (size_t c = 0; c < 64; ++c) identity.rotations[(matrix * 64 + c) * 64 + c] = 1;
  }
  EXPECT_EQ(ImportPublished(identity, identity, kOptions)->set.method, "none");
  EXPECT_EQ(ImportPublished(random, identity, kOptions)->set.method, "oscar");
  EXPECT_EQ(ImportPublished(identity, random, kOptions)->set.method, "oscar");
}

TEST(ImportTest, FilesInEachOthersPlaceAreRefused) {
  const auto message = [](const char* k, const char* v) {
    const absl::Status status = ImportPublished(RandomPublished({.objective = k}, 1),
                                                RandomPublished({.objective = v}, 2), kOptions)
                                    .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message("sst_r_h_pbr", "qqt_r_h_pbr"),
            "the file of keys has an objective of values: the objectives are 'sst_r_h_pbr' of keys "
            "and 'qqt_r_h_pbr' of values");
  EXPECT_EQ(message("hadamard", "qqt_r_h"),
            "the file of values has an objective of keys: the objectives are 'hadamard' of keys "
            "and 'qqt_r_h' of values");
  EXPECT_THAT(message("sst\n", "sst"), HasSubstr("'sst\\n' of keys"));
}

TEST(ImportTest, FilesThatDoNotBelongTogetherAreNamed) {
  struct Case {
    PublishedShape k;
    PublishedShape v;
    ImportOptions options;
    const char* message;
  };
  const auto with = [](const std::function<void(ImportOptions*)>& change) {
    ImportOptions options = kOptions;
    change(&options);
    return options;
  };
  const PublishedShape two_heads = {.heads = 2, .per_head = true};
  for (const Case& one : {
           Case{{.layer_ids = {0, 3, 4}}, {}, kOptions, "layer 4 is in the file of keys"},
           Case{{}, {.layer_ids = {0, 1, 3}}, kOptions, "layer 1 is in the file of values"},
           Case{{},
                {.head_dim = 128},
                kOptions,
                "layer 0 has a rotation [64, 64] of keys and [128, 128] of values"},
           Case{{},
                two_heads,
                kOptions,
                "layer 0 has a rotation [64, 64] of keys and [2, 64, 64] of values"},
           Case{two_heads, two_heads, with([](ImportOptions* o) { o->kv_heads = 4; }),
                "a rotation for each of 2 KV heads, kv_heads is 4"},
           Case{{}, {}, with([](ImportOptions* o) { o->kv_heads = 0; }), "kv_heads is 0"},
           Case{{},
                {},
                with([](ImportOptions* o) { o->kv_heads = 4'000'000'000; }),
                "kv_heads is 4000000000"},
           Case{{}, {}, with([](ImportOptions* o) { o->clip_k = 1; }), "clip_k is 1, not in"},
           Case{{}, {}, with([](ImportOptions* o) { o->clip_v = NAN; }), "clip_v is nan"},
           Case{{},
                {},
                with([](ImportOptions* o) { o->clip_v = 0.001; }),
                "clip_v 0.001 of 64 channels is rank 0"},
           Case{{}, {}, with([](ImportOptions* o) { o->group_size = 48; }), "'group_size' is 48"},
           Case{{}, {}, with([](ImportOptions* o) { o->model.clear(); }), "'model' is missing"},
       }) {
    const absl::Status status =
        ImportPublished(RandomPublished(one.k, 1), RandomValues(one.v, 2), one.options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.message));
  }
}

// The file of a set with tensors or metadata changed, its own hash left as it was.
std::string Changed(const SourcedSet& set,
                    const std::function<void(std::map<std::string, Safetensors::Tensor>*,
                                             std::map<std::string, std::string>*)>& change) {
  const std::string bytes = SerializeSourced(set);
  const Safetensors file = *Safetensors::Parse(bytes);
  std::map<std::string, Safetensors::Tensor> tensors = file.tensors();
  std::map<std::string, std::string> metadata = file.metadata();
  change(&tensors, &metadata);
  return WriteSafetensors(tensors, metadata);
}

TEST(ImportTest, ADamagedSourceIsRefused) {
  const SourcedSet set = Imported({});
  using Tensors = std::map<std::string, Safetensors::Tensor>;
  using Metadata = std::map<std::string, std::string>;
  const auto fails = [&](const std::function<void(Tensors*, Metadata*)>& change,
                         absl::StatusCode code, const char* message) {
    const absl::Status status = ParseSourced(Changed(set, change)).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  fails([](Tensors* t, Metadata*) { t->erase("source_r_k"); }, kInvalid, "'source_r_k' is missing");
  fails([](Tensors* t, Metadata*) { (*t)["source_r_v"].dtype = "I32"; }, kInvalid,
        "'source_r_v' is I32 [2, 1, 64, 64]");
  fails(
      [](Tensors* t, Metadata*) {
        (*t)["source_eigenvalues_k"].shape = {2, 64};
      },
      kInvalid, "'source_eigenvalues_k' is F32 [2, 64]");
  fails([](Tensors*, Metadata* m) { (*m)["source_shape"] = "head"; }, kInvalid,
        "'source_shape' is 'head'");
  for (const char* field :
       {"source_objective_k", "source_objective_v", "source_sha256", "source_shape"}) {
    fails([&](Tensors*, Metadata* m) { m->erase(field); }, kInvalid, field);
  }
  // One part alone is a damaged source too.
  const auto without = [](auto* parts, const std::string& kept) {
    for (auto it = parts->begin(); it != parts->end();) {
      const bool gone = it->first.compare(0, 7, "source_") == 0 && it->first != kept;
      it = gone ? parts->erase(it) : std::next(it);
    }
  };
  fails(
      [&](Tensors* t, Metadata* m) {
        without(t, "source_r_v");
        without(m, "");
      },
      kInvalid, "'source_shape' is missing");
  fails(
      [&](Tensors* t, Metadata* m) {
        without(t, "");
        without(m, "source_sha256");
      },
      kInvalid, "'source_shape' is missing");
  constexpr absl::StatusCode kLoss = absl::StatusCode::kDataLoss;
  fails([](Tensors* t, Metadata*) { t->erase("source_eigenvalues_v"); }, kLoss, "SHA-256");
  fails([](Tensors*, Metadata* m) { (*m)["source_objective_k"] = "x"; }, kLoss, "SHA-256");
  std::string flipped((*Safetensors::Parse(SerializeSourced(set))).Find("source_r_k")->data);
  flipped[0] ^= 1;  // A bit that the rounding to bf16 does not see.
  fails([&](Tensors* t, Metadata*) { (*t)["source_r_k"].data = flipped; }, kLoss, "SHA-256");

  SourcedSet other = set;
  other.source = Imported({.objective = "other"}).source;
  std::swap(other.source->k, other.source->v);
  EXPECT_THAT(std::string(ParseSourced(SerializeSourced(other)).status().message()),
              HasSubstr("does not round to r_k and r_v"));
  EXPECT_FALSE(ParseSourced("nothing").ok());
}

TEST(ImportTest, EigenvaluesThatNoCovarianceHasAreRefused) {
  for (const float bad : {NAN, 100.0f, -1.0f}) {
    SourcedSet set = Imported({});
    set.source->v.eigenvalues[64] = bad;  // Of layer 3; its SHA-256 is that of the changed ones.
    const absl::Status status = ParseSourced(SerializeSourced(set)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("its source, layer 3: "));
  }
}

// U H P_br with U's columns in ascending order, as the published code composes it.
std::vector<float> ComposeAsPublished(const EigenSystem& descending, uint32_t dim) {
  const Matrix h = Hadamard(dim);
  std::vector<float> rotation(size_t{dim} * dim);
  for (uint32_t row = 0; row < dim; ++row) {
    for (uint32_t j = 0; j < dim; ++j) {
      const uint32_t column = dim - 1 - BitReverse(j, dim);
      double sum = 0;
      for (uint32_t c = 0; c < dim; ++c) {
        sum += descending.vectors[row * dim + dim - 1 - c] * h[c * dim + column];
      }
      rotation[row * dim + j] = static_cast<float>(sum);
    }
  }
  return rotation;
}

TEST(RecoverTest, ThePublishedOrderGivesTheCovarianceBack) {
  constexpr uint32_t kDim = 64;
  const std::vector<float> mixed = RandomRotation(kDim, 9);
  Matrix covariance(kDim * kDim);
  for (uint32_t i = 0; i < kDim; ++i) {
    for (uint32_t j = 0; j < kDim; ++j) {
      for (uint32_t c = 0; c < kDim; ++c) {
        covariance[i * kDim + j] += mixed[i * kDim + c] * mixed[j * kDim + c] * (1.0 + c * c);
      }
    }
  }
  const auto system = SymmetricEigen(covariance, kDim);
  ASSERT_TRUE(system.ok());
  std::vector<float> ascending(system->values.rbegin(), system->values.rend());
  const std::vector<float> rotation = ComposeAsPublished(*system, kDim);
  const Matrix recovered = RecoverCovariance(rotation.data(), ascending.data(), kDim);
  double error = 0;
  for (size_t i = 0; i < covariance.size(); ++i) {
    error = std::max(error, std::abs(recovered[i] - covariance[i]));
  }
  EXPECT_LT(error, 1e-2);  // Of values up to 3,970, from fp32.
  std::reverse(ascending.begin(), ascending.end());
  const Matrix wrong = RecoverCovariance(rotation.data(), ascending.data(), kDim);
  EXPECT_GT(std::abs(wrong[0] - covariance[0]), 10);
}

TEST(RecoverTest, AsymmetryComparesTheChannelsOfFastPairs) {
  const auto diagonal = [](const std::vector<double>& values) {
    Matrix matrix(values.size() * values.size());
    for (size_t i = 0; i < values.size(); ++i) matrix[i * values.size() + i] = values[i];
    return matrix;
  };
  std::vector<double> values(64, 2.0);
  const RopePairs all = {.head_dim = 64, .rotary_dim = 64};
  EXPECT_EQ(RopePairAsymmetry(diagonal(values), all), 0);
  values[3] = 6;  // One of 12 pairs has 6 and 2.
  EXPECT_NEAR(RopePairAsymmetry(diagonal(values), all), 0.5 / 12, 1e-12);
  // With 16 channels turned there are 3 fast pairs, (0, 8) to (2, 10).
  const RopePairs some = {.head_dim = 64, .rotary_dim = 16};
  EXPECT_EQ(RopePairAsymmetry(diagonal(values), some), 0);
  values[10] = 0;
  EXPECT_NEAR(RopePairAsymmetry(diagonal(values), some), 1.0 / 3, 1e-12);
  values[2] = 0;
  EXPECT_EQ(RopePairAsymmetry(diagonal(values), some), 0);
}

TEST(RecoverTest, OnlyTheComposedObjectivesWithEigenvaluesAreRecoverable) {
  EXPECT_TRUE(IsRecoverable(RandomPublished({}, 1)));
  EXPECT_FALSE(IsRecoverable(RandomPublished({.objective = "hadamard"}, 1)));
  EXPECT_FALSE(IsRecoverable(RandomPublished({.heads = 2, .per_head = true}, 1)));
}

}  // namespace
}  // namespace okv

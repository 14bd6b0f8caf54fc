#include "proto/format.h"

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/fields.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::ExampleFormat;
using examples::StatusIs;
using ::testing::HasSubstr;

struct Change {
  std::string field;
  std::function<void(Format*)> apply;
};

// One change of each field, in declaration order.
std::vector<Change> ChangeOfEachField() {
  return {
      {"model", [](Format* f) { f->model += "x"; }},
      {"weights_revision", [](Format* f) { f->weights_revision = "r2"; }},
      {"layer_ids", [](Format* f) { f->layer_ids.push_back(9); }},
      {"kv_heads", [](Format* f) { f->kv_heads = 3; }},
      {"head_dim_k", [](Format* f) { f->head_dim_k = 128; }},
      {"head_dim_v", [](Format* f) { f->head_dim_v = 128; }},
      {"rope_theta", [](Format* f) { f->rope_theta = std::nextafter(f->rope_theta, 0); }},
      {"rope_scaling", [](Format* f) { f->rope_scaling = "yarn"; }},
      {"block_tokens", [](Format* f) { f->block_tokens = 128; }},
      {"sink_tokens", [](Format* f) { f->sink_tokens = 128; }},
      {"recent_tokens", [](Format* f) { f->recent_tokens = 512; }},
      {"view", [](Format* f) { f->view = "longest"; }},
      {"group_size", [](Format* f) { f->group_size = 64; }},
      {"rotation_hash", [](Format* f) { f->rotation_hash.bytes[31] ^= 1; }},
      {"page_layout_version", [](Format* f) { f->page_layout_version = 2; }},
  };
}

TEST(FormatTest, CanonicalIsTheGoldenFile) {
  golden::ExpectGolden("format", "Format::Canonical() of examples::ExampleFormat()",
                       ExampleFormat().Canonical());
  golden::ExpectGolden("format_id", "Format::id() of examples::ExampleFormat()",
                       ExampleFormat().id().view());
}

TEST(FormatTest, ParseReadsWhatCanonicalWrote) {
  Format format = ExampleFormat();
  format.layer_ids = {0, 7, 4294967295u};
  format.rope_theta = 1234.5;
  format.rope_scaling = "{\"type\":\"llama3\"}\n";
  format.view = "vLLM \xc3\xa9";
  format.sink_tokens = 128;
  format.recent_tokens = 4294967232u;
  const auto parsed = Format::Parse(format.Canonical());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, format);
  EXPECT_EQ(parsed->id(), format.id());
  EXPECT_EQ(parsed->layers_count(), 3u);
  EXPECT_EQ(parsed->sink_blocks(), 2u);
  EXPECT_EQ(parsed->recent_blocks(), 67108863u);
}

TEST(FormatTest, ParseAcceptsTheLargestFormat) {
  Format format = ExampleFormat();
  format.model = std::string(kFormatTextBytesMax, 'm');
  format.rope_scaling = std::string(kFormatTextBytesMax, 's');
  format.layer_ids.clear();
  for (uint32_t layer = 0; layer < kLayersMax; ++layer) format.layer_ids.push_back(layer);
  format.kv_heads = kKvHeadsMax;
  const auto parsed = Format::Parse(format.Canonical());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, format);
}

TEST(FormatTest, EveryFieldChangesTheId) {
  std::set<FormatId> ids = {ExampleFormat().id()};
  for (const Change& change : ChangeOfEachField()) {
    Format format = ExampleFormat();
    change.apply(&format);
    EXPECT_TRUE(ids.insert(format.id()).second) << change.field;
  }
  EXPECT_EQ(ids.size(), 16u);
}

TEST(FormatTest, DescribeDifferenceNamesEachField) {
  EXPECT_EQ(DescribeDifference(ExampleFormat(), ExampleFormat()), "");
  for (const Change& change : ChangeOfEachField()) {
    Format format = ExampleFormat();
    change.apply(&format);
    EXPECT_THAT(DescribeDifference(ExampleFormat(), format),
                HasSubstr("field '" + change.field + "' differs: "));
  }
}

TEST(FormatTest, DescribeDifferenceNamesTheFirstFieldInDeclarationOrder) {
  Format format = ExampleFormat();
  const std::vector<Change> changes = ChangeOfEachField();
  for (size_t i = changes.size(); i-- > 0;) {
    changes[i].apply(&format);
    EXPECT_THAT(DescribeDifference(ExampleFormat(), format),
                HasSubstr("field '" + changes[i].field + "' differs: "));
  }
}

TEST(FormatTest, DescribeDifferencePrintsBothValues) {
  const auto describe = [](const std::function<void(Format*)>& apply) {
    Format there = ExampleFormat();
    apply(&there);
    return DescribeDifference(ExampleFormat(), there);
  };
  EXPECT_EQ(describe([](Format* f) { f->group_size = 64; }),
            "field 'group_size' differs: 32 here, 64 there");
  EXPECT_EQ(describe([](Format* f) { f->view = ""; }),
            "field 'view' differs: \"exact\" here, \"\" there");
  EXPECT_EQ(describe([](Format* f) { f->rope_theta = 5e5; }),
            "field 'rope_theta' differs: 100000 here, 500000 there");
  EXPECT_EQ(describe([](Format* f) { f->rope_theta = std::nextafter(1e5, 0); }),
            "field 'rope_theta' differs: 100000 here, 99999.999999999985 there");
  EXPECT_EQ(describe([](Format* f) {
              f->layer_ids = {0, 5};
            }),
            "field 'layer_ids' differs: 1 layers here, 2 layers with 5 at position 1 there");
  EXPECT_EQ(describe([](Format* f) { f->layer_ids = {2}; }),
            "field 'layer_ids' differs: 1 layers with 0 at position 0 here, "
            "1 layers with 2 at position 0 there");
  const std::string hash = ExampleFormat().rotation_hash.Hex();
  EXPECT_EQ(describe([](Format* f) { f->rotation_hash = {}; }),
            "field 'rotation_hash' differs: " + hash + " here, " + std::string(64, '0') + " there");
}

TEST(FormatTest, ValidateNamesTheFieldThatIsMissingOrOutOfRange) {
  const std::vector<Change> bad = {
      {"model", [](Format* f) { f->model.clear(); }},
      {"model", [](Format* f) { f->model = std::string(kFormatTextBytesMax + 1, 'm'); }},
      {"model", [](Format* f) { f->model = "\xff"; }},
      {"weights_revision", [](Format* f) { f->weights_revision.clear(); }},
      {"layer_ids", [](Format* f) { f->layer_ids.clear(); }},
      {"layer_ids",
       [](Format* f) {
         f->layer_ids = {1, 1};
       }},
      {"layer_ids",
       [](Format* f) {
         f->layer_ids = {1, 0};
       }},
      {"layer_ids", [](Format* f) { f->layer_ids.resize(kLayersMax + 1); }},
      {"kv_heads", [](Format* f) { f->kv_heads = 0; }},
      {"kv_heads", [](Format* f) { f->kv_heads = kKvHeadsMax + 1; }},
      {"head_dim_k", [](Format* f) { f->head_dim_k = f->head_dim_v = 0; }},
      {"head_dim_k", [](Format* f) { f->head_dim_k = f->head_dim_v = 96; }},
      {"head_dim_v", [](Format* f) { f->head_dim_v = 128; }},
      {"rope_theta", [](Format* f) { f->rope_theta = 0; }},
      {"rope_theta", [](Format* f) { f->rope_theta = -1; }},
      {"rope_theta", [](Format* f) { f->rope_theta = std::nan(""); }},
      {"rope_theta", [](Format* f) { f->rope_theta = std::numeric_limits<double>::infinity(); }},
      {"rope_scaling", [](Format* f) { f->rope_scaling = std::string(4097, 's'); }},
      {"rope_scaling", [](Format* f) { f->rope_scaling = "\xc0\x80"; }},
      {"block_tokens", [](Format* f) { f->block_tokens = 0; }},
      {"block_tokens", [](Format* f) { f->block_tokens = 128; }},
      {"sink_tokens", [](Format* f) { f->sink_tokens = 0; }},
      {"sink_tokens", [](Format* f) { f->sink_tokens = 65; }},
      {"recent_tokens", [](Format* f) { f->recent_tokens = 63; }},
      {"view", [](Format* f) { f->view.clear(); }},
      {"group_size", [](Format* f) { f->group_size = 0; }},
      {"group_size", [](Format* f) { f->group_size = 16; }},
      {"group_size", [](Format* f) { f->group_size = 48; }},
      {"group_size", [](Format* f) { f->group_size = 128; }},
      {"rotation_hash", [](Format* f) { f->rotation_hash = {}; }},
      {"page_layout_version", [](Format* f) { f->page_layout_version = kPageLayoutVersion + 1; }},
      {"page_layout_version", [](Format* f) { f->page_layout_version = 0; }},
  };
  EXPECT_TRUE(ExampleFormat().Validate().ok());
  for (const Change& change : bad) {
    Format format = ExampleFormat();
    change.apply(&format);
    const auto fails =
        StatusIs(absl::StatusCode::kInvalidArgument, "format field '" + change.field + "' ");
    EXPECT_THAT(format.Validate(), fails);
    EXPECT_FALSE(Format::Parse(format.Canonical()).ok()) << change.field;
  }
}

TEST(FormatTest, ValidateNamesTheFirstFieldOfAnEmptyFormat) {
  EXPECT_THAT(Format().Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, "format field 'model' is missing"));
}

TEST(FormatTest, ValidateAcceptsNoRecentTokens) {
  Format format = ExampleFormat();
  format.recent_tokens = 0;
  EXPECT_TRUE(format.Validate().ok());
}

TEST(FormatTest, ParseReportsAnUnknownPageLayoutVersionByName) {
  Format format = ExampleFormat();
  format.page_layout_version = 77;
  EXPECT_THAT(Format::Parse(format.Canonical()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "'page_layout_version' is 77"));
}

TEST(FormatTest, ParseRejectsEveryTruncationAndEveryTrailingByte) {
  const std::string canonical = ExampleFormat().Canonical();
  for (size_t size = 0; size < canonical.size(); ++size) {
    EXPECT_THAT(Format::Parse(absl::string_view(canonical).substr(0, size)).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, ""))
        << size;
  }
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_FALSE(Format::Parse(canonical + static_cast<char>(byte)).ok()) << byte;
  }
}

// The encoding is a bijection: what Parse accepts is what Canonical writes for the result.
void ExpectRejectedOrCanonical(const std::string& bytes) {
  const auto parsed = Format::Parse(bytes);
  if (parsed.ok()) {
    EXPECT_EQ(parsed->Canonical(), bytes);
  } else {
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(FormatTest, AFlippedBitIsRejectedOrAnotherFormat) {
  const std::string canonical = ExampleFormat().Canonical();
  for (size_t bit = 0; bit < canonical.size() * 8; ++bit) {
    std::string flipped = canonical;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    ExpectRejectedOrCanonical(flipped);
    const auto parsed = Format::Parse(flipped);
    if (!parsed.ok()) continue;
    EXPECT_NE(parsed->id(), ExampleFormat().id()) << bit;
  }
}

TEST(FormatTest, RandomChangesAreRejectedOrAnotherFormat) {
  std::mt19937_64 random(examples::Seed());
  const std::string canonical = ExampleFormat().Canonical();
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = canonical;
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % bytes.size();
      switch (random() % 3) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 8);
          break;
        default:
          bytes.insert(at, 1 + random() % 8, static_cast<char>(random()));
          break;
      }
      if (bytes.empty()) break;
    }
    ExpectRejectedOrCanonical(bytes);
  }
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = "OKVF\x01";
    bytes.resize(random() % 300);
    for (size_t at = 5; at < bytes.size(); ++at) bytes[at] = static_cast<char>(random() % 20);
    ExpectRejectedOrCanonical(bytes);
  }
}

TEST(FormatTest, ParseRejectsFieldsOutOfOrderTwiceOrMissing) {
  // The canonical bytes cut into magic and fields.
  const std::string canonical = ExampleFormat().Canonical();
  std::vector<std::string> fields;
  for (size_t at = 5; at < canonical.size();) {
    const size_t length = FieldReader(absl::string_view(canonical).substr(at + 1)).Unsigned(4);
    fields.push_back(canonical.substr(at, 5 + length));
    at += 5 + length;
  }
  ASSERT_EQ(fields.size(), 15u);
  const auto join = [&](const std::vector<std::string>& parts) {
    std::string bytes = canonical.substr(0, 5);
    for (const std::string& part : parts) bytes += part;
    return bytes;
  };
  ASSERT_EQ(join(fields), canonical);
  for (size_t i = 0; i < fields.size(); ++i) {
    std::vector<std::string> missing = fields;
    missing.erase(missing.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_FALSE(Format::Parse(join(missing)).ok()) << i;
    std::vector<std::string> twice = fields;
    twice.insert(twice.begin() + static_cast<ptrdiff_t>(i), fields[i]);
    EXPECT_FALSE(Format::Parse(join(twice)).ok()) << i;
    if (i == 0) continue;
    std::vector<std::string> swapped = fields;
    std::swap(swapped[i - 1], swapped[i]);
    EXPECT_FALSE(Format::Parse(join(swapped)).ok()) << i;
  }
}

TEST(FormatTest, ParseRejectsAClaimedLengthBeyondTheLimit) {
  std::string bytes = "OKVF";
  bytes += '\x01';
  FieldWriter(&bytes).Bytes(1, std::string(kFormatTextBytesMax + 1, 'm'));
  EXPECT_FALSE(Format::Parse(bytes).ok());
  EXPECT_FALSE(Format::Parse(absl::string_view("OKVF\x01\x01\xff\xff\xff\xff"
                                               "m",
                                               11))
                   .ok());
}

}  // namespace
}  // namespace okv

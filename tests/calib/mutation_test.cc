// What a damaged or hostile file may do to the readers of .pt and .npy files: nothing but a typed
// error, or a correct result.

#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "calib/npy.h"
#include "calib/published.h"
#include "calib/torch_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/torch_data.h"

namespace {
std::atomic<size_t> largest_allocation_bytes{0};
}  // namespace

// Sees every allocation of the program.
void* operator new(size_t bytes) {
  size_t seen = largest_allocation_bytes.load(std::memory_order_relaxed);
  while (bytes > seen && !largest_allocation_bytes.compare_exchange_weak(seen, bytes)) {
  }
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace okv {
namespace {

using Random = std::mt19937;

size_t Pick(Random* random, size_t below) {
  return std::uniform_int_distribution<size_t>(0, below - 1)(*random);
}

// Values that readers stumble over: ends of ranges, and whatever comes.
uint64_t WildNumber(Random* random) {
  constexpr uint64_t kWild[] = {0,          1,          0x7f,        0xff,
                                0xffff,     0x7fffffff, 0x80000000,  0xffffffff,
                                0xfffffffe, 1u << 30,   ~uint64_t{0}};
  const size_t pick = Pick(random, std::size(kWild) + 1);
  return pick < std::size(kWild) ? kWild[pick] : (*random)();
}

void PutWildNumber(Random* random, std::string* bytes) {
  const size_t width = size_t{1} << Pick(random, 4);
  if (bytes->size() < width) return;
  const size_t at = Pick(random, bytes->size() - width + 1);
  const uint64_t number = WildNumber(random);
  for (size_t i = 0; i < width; ++i) (*bytes)[at + i] = static_cast<char>(number >> (8 * i));
}

void MutateBytes(Random* random, std::string* bytes) {
  switch (Pick(random, 5)) {
    case 0:
      bytes->resize(Pick(random, bytes->size()));
      break;
    case 1:
      for (size_t flips = 1 + Pick(random, 4); flips > 0; --flips) {
        (*bytes)[Pick(random, bytes->size())] ^= static_cast<char>(1 << Pick(random, 8));
      }
      break;
    case 2:
      PutWildNumber(random, bytes);
      break;
    case 3:
      bytes->insert(Pick(random, bytes->size()), 1 + Pick(random, 8),
                    static_cast<char>((*random)()));
      break;
    default: {
      const size_t at = Pick(random, bytes->size());
      bytes->erase(at, 1 + Pick(random, 8));
    }
  }
}

// The same container with a damaged pickle under a right CRC-32, so that the damage reaches the
// pickle's reader.
std::string WithMutatedPickle(Random* random, const std::string& bytes) {
  const ZipReader zip = *ZipReader::Open(bytes);
  const std::string folder = zip.first_name().substr(0, zip.first_name().find('/') + 1);
  std::string pickle(*zip.Read(folder + "data.pkl"));
  MutateBytes(random, &pickle);
  ZipWriter writer;
  writer.Add(folder + "data.pkl", pickle);
  for (int i = 0;; ++i) {
    const std::string name = folder + "data/" + std::to_string(i);
    if (!zip.Contains(name)) break;
    writer.Add(name, *zip.Read(name));
  }
  return *writer.Finish();
}

// Of damage near the directory there would be little if it fell anywhere in the file.
std::string WithMutatedDirectory(Random* random, std::string bytes) {
  const size_t at = bytes.find("PK\x01\x02");
  std::string tail = bytes.substr(at);
  MutateBytes(random, &tail);
  return bytes.substr(0, at) + tail;
}

// Runs `read` over 200 damaged copies of `bytes`; it gives OK only for a result that holds
// together.
void ExpectErrorsOrResults(const std::string& bytes, uint32_t seed,
                           const std::function<absl::Status(const std::string&)>& read) {
  ASSERT_TRUE(read(bytes).ok()) << read(bytes);
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  int errors = 0;
  for (int i = 0; i < 200; ++i) {
    std::string damaged = bytes;
    if (i % 4 == 0) {
      MutateBytes(&random, &damaged);
    } else if (i % 4 == 1) {
      damaged = WithMutatedDirectory(&random, bytes);
    } else {
      damaged = WithMutatedPickle(&random, bytes);
    }
    largest_allocation_bytes = 0;
    const absl::Status status = read(damaged);
    const size_t largest = largest_allocation_bytes;
    EXPECT_LE(largest, 2 * bytes.size() + (1 << 16)) << "mutation " << i;
    if (status.ok()) continue;
    ++errors;
    EXPECT_TRUE(status.code() == absl::StatusCode::kInvalidArgument ||
                status.code() == absl::StatusCode::kDataLoss)
        << "mutation " << i << ": " << status;
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_GT(errors, 100);
  testing::Test::RecordProperty("errors", errors);
}

absl::Status ReadPublishedWhole(const std::string& bytes) {
  const auto read = ParsePublished(bytes);
  if (!read.ok()) return read.status();
  const size_t matrices = read->layer_ids.size() * read->heads;
  EXPECT_EQ(read->rotations.size(), matrices * read->head_dim * read->head_dim);
  EXPECT_TRUE(read->eigenvalues.empty() || read->eigenvalues.size() == matrices * read->head_dim);
  return absl::OkStatus();
}

TEST(MutationTest, Version1FilesGiveErrorsOrResults) {
  const PublishedRotations rotations = RandomPublished({.layer_ids = {0, 1, 70'000}}, 1);
  ExpectErrorsOrResults(*WritePublished(rotations, PublishedVersion::kLayer, 1, "k"), 20261129,
                        ReadPublishedWhole);
}

TEST(MutationTest, Version2FilesGiveErrorsOrResults) {
  const PublishedRotations rotations = RandomPublished({.heads = 2, .per_head = true}, 1);
  ExpectErrorsOrResults(*WritePublished(rotations, PublishedVersion::kKvHead, 2, "k"), 20261130,
                        ReadPublishedWhole);
}

TEST(MutationTest, TensorFilesGiveErrorsOrResults) {
  const std::string bytes =
      TorchTensorFile(TorchType::kBFloat16, {20, 2, 64}, std::string(20 * 2 * 64 * 2, '\x3f'));
  ExpectErrorsOrResults(bytes, 20261201, [](const std::string& damaged) -> absl::Status {
    const auto file = TorchFile::Open(damaged);
    if (!file.ok()) return file.status();
    const Pickle& pickle = file->pickle();
    if (pickle.at(pickle.root()).kind != Pickle::Kind::kTensor) {
      return absl::InvalidArgumentError("no tensor");
    }
    const TorchTensor& tensor = pickle.tensor(pickle.root());
    const auto floats = file->ReadFloats(tensor);
    if (!floats.ok()) return floats.status();
    EXPECT_EQ(floats->size(), tensor.elements());
    return absl::OkStatus();
  });
}

TEST(MutationTest, NumpyFilesGiveErrorsOrResults) {
  const std::string bytes =
      NpyFile("{'descr': '<f2', 'fortran_order': False, 'shape': (20, 2, 64), }",
              std::string(20 * 2 * 64 * 2, '\x3f'));
  const auto whole = NpyArray::Parse(bytes);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_TRUE(whole->ReadFloats().ok()) << whole->ReadFloats().status();
  Random random(20261202);
  SCOPED_TRACE("seed 20261202");
  for (int i = 0; i < 200; ++i) {
    // The header: numbers have no checksum, and every pattern of bits is one.
    std::string damaged = bytes.substr(0, 128);
    MutateBytes(&random, &damaged);
    damaged += bytes.substr(128);
    largest_allocation_bytes = 0;
    const auto array = NpyArray::Parse(damaged);
    const auto floats =
        array.ok() && array->HasFloats() ? array->ReadFloats() : std::vector<float>();
    EXPECT_LE(largest_allocation_bytes, 2 * bytes.size() + (1 << 16)) << "mutation " << i;
    if (array.ok()) {
      EXPECT_TRUE(floats.ok());
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(array.status()) || absl::IsDataLoss(array.status()))
          << "mutation " << i << ": " << array.status();
    }
  }
}

}  // namespace
}  // namespace okv

// A disk that is full, read-only, or nearly full of others' files, while the node runs.

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TempDir;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;

TestObject Block(uint32_t number) {
  return MakeObject({.number = number, .codec = Codec::kBf16, .chain_blocks = 4});
}

// A small file system in memory; not there without the right to mount.
class SmallMount {
 public:
  explicit SmallMount(uint64_t bytes) : bytes_(bytes) {
    mounted_ = mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, Size().c_str()) == 0;
    if (!mounted_) why_ = std::strerror(errno);
  }
  ~SmallMount() {
    if (mounted_) umount2(directory_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::string& why() const { return why_; }
  const std::string& path() const { return directory_.path(); }

 private:
  std::string Size() const { return "size=" + std::to_string(bytes_); }

  const TempDir directory_;
  const uint64_t bytes_;
  bool mounted_ = false;
  std::string why_;
};

// Directories in which nothing can be made or deleted. A file system with open files cannot be
// mounted read-only, and this fails in the same calls.
class Immutable {
 public:
  // 0 or an errno.
  int Set(const std::string& path, bool on) {
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno;
    int flags = 0;
    int error = ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 ? 0 : errno;
    flags = on ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
    if (error == 0) error = ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0 ? 0 : errno;
    close(fd);
    if (error == 0 && on) paths_.push_back(path);
    return error;
  }
  ~Immutable() {
    for (const std::string& path : paths_) Set(path, false);
  }

 private:
  std::vector<std::string> paths_;
};

class DiskFaultsTest : public testing::Test {
 protected:
  void SetUp() override {
    node_.log = [this](const std::string& line) {
      std::lock_guard lock(mu_);
      lines_.push_back(line);
    };
  }
  size_t LinesWith(const std::string& text) {
    std::lock_guard lock(mu_);
    size_t count = 0;
    for (const std::string& line : lines_) count += absl::StrContains(line, text) ? 1 : 0;
    return count;
  }
  // Writes from `*next` on until one is refused, at most 200.
  absl::Status WriteUntilRefused(uint32_t* next) {
    for (int i = 0; i < 200; ++i) {
      const absl::Status status = node_.Write(Block(*next));
      if (!status.ok()) return status;
      ++*next;
    }
    return absl::OkStatus();
  }
  // Writes go through again, within the deadline.
  void ExpectRecovers(uint32_t* next) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    uint32_t taken = 0;
    while (taken < 60) {
      const absl::Status status = node_.Write(Block(*next));
      if (status.ok()) {
        ++*next;
        ++taken;
        continue;
      }
      ASSERT_LT(std::chrono::steady_clock::now(), end) << status;
    }
  }
  // Whatever the table holds can be read as it was written.
  uint32_t ExpectHeldIsRight(uint32_t written) {
    uint32_t held = 0;
    for (uint32_t number = 0; number < written; ++number) {
      const auto payload = node_.Read(Block(number).id());
      if (absl::IsNotFound(payload.status())) continue;
      EXPECT_TRUE(payload.ok()) << number << ": " << payload.status();
      if (!payload.ok()) continue;
      EXPECT_EQ(*payload, Block(number).payload) << number;
      ++held;
    }
    return held;
  }

  TestStorage node_;
  std::mutex mu_;
  std::vector<std::string> lines_;
};

class SmallDiskTest : public DiskFaultsTest {
 protected:
  void SetUp() override {
    DiskFaultsTest::SetUp();
    if (!mount_.mounted()) GTEST_SKIP() << "cannot mount a tmpfs: " << mount_.why();
  }
  // The storage in it goes first.
  void TearDown() override {
    if (node_.storage != nullptr) node_.Close();
  }

  SmallMount mount_{uint64_t{16} << 20};
};

// The limit is larger than the disk: only its errors tell that it is full.
TEST_F(SmallDiskTest, AFullDiskIsTypedAndTheNodeGoesOn) {
  StorageOptions options = TestStorageOptions(mount_.path());
  options.spill.allocate_wait_nanos = 200'000'000;
  ASSERT_TRUE(node_.Open(options).ok());
  const std::string filler = mount_.path() + "/filler";
  testing_support::WriteFile(filler, std::string(size_t{15} << 20, 'x'));
  uint32_t next = 0;
  absl::Status status = WriteUntilRefused(&next);
  // Either the disk had no room at all, or it evicts to make it: both go on.
  ASSERT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
  EXPECT_GE(ExpectHeldIsRight(next), 10u);
  std::filesystem::remove(filler);
  ExpectRecovers(&next);
  EXPECT_GE(ExpectHeldIsRight(next), 60u);
}

// At no moment is there a page for RocksDB's own files either.
TEST_F(SmallDiskTest, ADiskThatOthersFillToTheLastPageAgainAndAgainEndsNothing) {
  StorageOptions options = TestStorageOptions(mount_.path());
  options.disk.disk_bytes = uint64_t{10} << 20;
  options.spill.allocate_wait_nanos = 200'000'000;
  ASSERT_TRUE(node_.Open(options).ok());
  uint32_t next = 0;
  for (; next < 200; ++next) ASSERT_TRUE(node_.Write(Block(next)).ok()) << next;
  const std::string filler = mount_.path() + "/filler";
  std::atomic<bool> stop{false};
  std::thread others([&] {
    const int fd = open(filler.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    const std::string page(4096, 'x');
    while (!stop) {
      if (write(fd, page.data(), page.size()) <= 0) std::this_thread::yield();
    }
    close(fd);
  });
  for (int i = 0; i < 60; ++i) {
    const absl::Status status = node_.Write(Block(next));
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    if (status.ok()) ++next;
  }
  stop = true;
  others.join();
  EXPECT_GE(ExpectHeldIsRight(next), 10u);
  std::filesystem::remove(filler);
  ExpectRecovers(&next);
  EXPECT_GE(ExpectHeldIsRight(next), 60u);
}

TEST_F(DiskFaultsTest, ADiskThatTakesNothingIsTypedAndTheNodeRecoversWithIt) {
  const TempDir directory;
  StorageOptions options = TestStorageOptions(directory.path());
  options.spill.allocate_wait_nanos = 200'000'000;
  options.disk.disk_bytes = uint64_t{8} << 20;
  ASSERT_TRUE(node_.Open(options).ok());
  ASSERT_TRUE(node_.storage->formats()->Add(testing_support::TestFormat()).ok());
  uint32_t next = 0;
  for (; next < 40; ++next) ASSERT_TRUE(node_.Write(Block(next)).ok());
  {
    Immutable immutable;
    const int error = immutable.Set(directory.Path("rocksdb"), true);
    if (error != 0) GTEST_SKIP() << "cannot make a directory immutable: " << std::strerror(error);
    ASSERT_EQ(immutable.Set(directory.Path("groups"), true), 0);
    const absl::Status status = WriteUntilRefused(&next);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_GT(node_.Metric("okv_node_spill_failures_total{code=\"UNAVAILABLE\"}"), 0);
    EXPECT_EQ(LinesWith("takes nothing"), 1u);
    EXPECT_GE(ExpectHeldIsRight(next), 15u) << "what DRAM holds is served";
  }
  ExpectRecovers(&next);
  EXPECT_EQ(LinesWith("again"), 1u);
  ExpectHeldIsRight(next);
  node_.Close();
  TestStorage restarted;
  ASSERT_TRUE(restarted.Open(options).ok());
  EXPECT_GT(restarted.storage->table()->stats().objects_count, 40u);
  EXPECT_EQ(restarted.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), 0);
  restarted.Close();
}

TEST_F(SmallDiskTest, BelowTheFloorNothingIsSpilledAndTheDiskTierGivesWay) {
  StorageOptions options = TestStorageOptions(mount_.path());
  options.spill.allocate_wait_nanos = 200'000'000;
  options.disk.free_floor_bytes = uint64_t{4} << 20;
  ASSERT_TRUE(node_.Open(options).ok());
  const RocksdbTier* disk = node_.storage->disk();
  uint32_t next = 0;
  for (; next < 300; ++next) {
    ASSERT_TRUE(node_.Write(Block(next)).ok()) << next;
    ASSERT_GE(disk->FreeBytes(), options.disk.free_floor_bytes - (uint64_t{1} << 20)) << next;
  }
  EXPECT_GT(node_.Metric("okv_node_evicted_objects_total{reason=\"free_floor\"}"), 0);
  EXPECT_EQ(node_.Metric("okv_node_disk_free_floor_bytes"), options.disk.free_floor_bytes);
  const uint64_t before = disk->stats().occupied_bytes;
  // Somebody else needs the disk: the tier gives way, with nobody writing.
  const std::string filler = mount_.path() + "/filler";
  testing_support::WriteFile(filler, std::string(size_t{3} << 20, 'x'));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (disk->ShortBytes(0) > 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << disk->ShortBytes(0);
    std::this_thread::yield();
  }
  EXPECT_LT(disk->stats().occupied_bytes, before);
  ExpectHeldIsRight(next);
}

TEST_F(SmallDiskTest, BelowAFloorThatCannotBeReachedDramIsACacheOfItsOwn) {
  StorageOptions options = TestStorageOptions(mount_.path());
  options.spill.allocate_wait_nanos = 200'000'000;
  options.disk.free_floor_bytes = uint64_t{1} << 40;
  ASSERT_TRUE(node_.Open(options).ok());
  for (uint32_t next = 0; next < 200; ++next) {
    const absl::Status status = node_.Write(Block(next));
    ASSERT_TRUE(status.ok()) << next << ": " << status;
  }
  EXPECT_EQ(node_.storage->disk()->stats().objects_count, 0u);
  const uint32_t held = ExpectHeldIsRight(200);
  EXPECT_GE(held, 12u) << "DRAM has room for 16";
  EXPECT_EQ(node_.Metric("okv_node_evicted_objects_total{reason=\"free_floor\"}"), 200 - held);
  EXPECT_EQ(LinesWith("takes nothing"), 1u);
  EXPECT_GT(node_.Metric("okv_node_spill_failures_total{code=\"RESOURCE_EXHAUSTED\"}"), 0);
}

}  // namespace
}  // namespace okv

#include "cmd/bench/ipc.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cmd/bench/cuda_timing.h"
#include "cmd/bench/sample.h"
#include "cmd/support/files.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr uint32_t kStreamsMax = 32;
constexpr uint32_t kRoundsMax = 1000;
constexpr uint64_t kBytesMax = uint64_t{64} << 30;

// What block `block` holds: other words in every block.
void FillPattern(uint32_t block, absl::Span<uint64_t> words) {
  uint64_t state = (uint64_t{block} + 1) * 0x9e3779b97f4a7c15;
  for (uint64_t& word : words) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    word = state;
  }
}

absl::Span<uint8_t> BytesOf(std::vector<uint64_t>* words) {
  return {reinterpret_cast<uint8_t*>(words->data()), words->size() * sizeof(uint64_t)};
}

absl::Status Fill(const IpcBlocks& blocks, const cuda::DeviceBuffer& memory) {
  std::vector<uint64_t> words(blocks.block_bytes / sizeof(uint64_t));
  for (uint32_t block = 0; block < blocks.blocks; ++block) {
    FillPattern(block, absl::MakeSpan(words));
    OKV_RETURN_IF_ERROR(CopyToDevice(BytesOf(&words), block * blocks.block_bytes, memory));
  }
  return CudaStatus(cudaDeviceSynchronize(), "filling blocks");
}

}  // namespace

absl::Status RunIpcOwner(const IpcBlocks& blocks, uint32_t device, const std::string& handle_file) {
  OKV_RETURN_IF_ERROR(TakeDevice(device));
  OKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer memory, AllocateDevice(blocks.bytes()));
  OKV_RETURN_IF_ERROR(Fill(blocks, memory));
  cudaIpcMemHandle_t handle;
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaIpcGetMemHandle(&handle, memory.data()), "exporting device memory"));
  const absl::string_view bytes(handle.reserved, sizeof(handle.reserved));
  OKV_RETURN_IF_ERROR(
      WriteFileAtomically(handle_file, absl::StrCat(absl::BytesToHexString(bytes), "\n")));
  while (true) pause();  // The parent kills it.
}

absl::StatusOr<std::unique_ptr<IpcArena>> IpcArena::Start(const std::string& directory,
                                                          const IpcBlocks& blocks,
                                                          uint32_t device) {
  auto arena = absl::WrapUnique(new IpcArena(blocks));
  const std::string file = absl::StrCat(directory, "/ipc.handle");
  OKV_ASSIGN_OR_RETURN(
      arena->owner_,
      ChildProcess::Start(
          {.argv = {ProgramPath("okv-bench"), "ipc_owner", "--ipc_handle_file", file,
                    "--ipc_block_bytes", absl::StrCat(blocks.block_bytes), "--ipc_blocks",
                    absl::StrCat(blocks.blocks), "--node_gpu", absl::StrCat(device)},
           .environment = {},
           .output_path = absl::StrCat(directory, "/ipc_owner.log")}));
  OKV_RETURN_IF_ERROR(arena->owner_->WaitForFile(file, absl::Now() + kStartTimeout));
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  unlink(file.c_str());  // The next arena's child writes its own.
  const std::string bytes = absl::HexStringToBytes(absl::StripTrailingAsciiWhitespace(text));
  cudaIpcMemHandle_t handle;
  if (bytes.size() != sizeof(handle.reserved)) {
    return absl::InternalError(absl::StrCat("no IPC handle: '", text, "'"));
  }
  std::memcpy(handle.reserved, bytes.data(), bytes.size());
  void* data = nullptr;
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
                 "mapping another process's device memory"));
  arena->data_ = static_cast<uint8_t*>(data);
  return arena;
}

IpcArena::~IpcArena() {
  if (data_ != nullptr) static_cast<void>(cudaIpcCloseMemHandle(data_));
}

absl::Status IpcArena::CheckCopy(const uint8_t* to, absl::Span<const uint32_t> slots) const {
  OKV_CHECK(slots.size() == blocks_.blocks);
  std::vector<uint64_t> expected(blocks_.block_bytes / sizeof(uint64_t));
  std::vector<uint64_t> found(expected.size());
  for (uint32_t block = 0; block < blocks_.blocks; ++block) {
    FillPattern(block, absl::MakeSpan(expected));
    OKV_RETURN_IF_ERROR(CudaStatus(cudaMemcpy(found.data(), to + slots[block] * blocks_.block_bytes,
                                              blocks_.block_bytes, cudaMemcpyDeviceToHost),
                                   "reading a copied block"));
    if (found != expected) {
      return absl::DataLossError(
          absl::StrCat("block ", block, " did not arrive in slot ", slots[block]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<BlockCopier>> BlockCopier::Create(uint32_t streams_max) {
  auto copier = absl::WrapUnique(new BlockCopier());
  for (uint32_t i = 0; i < streams_max; ++i) {
    cudaStream_t stream = nullptr;
    OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                   "creating a stream to copy on"));
    copier->streams_.push_back(stream);
  }
  return copier;
}

BlockCopier::~BlockCopier() {
  for (const cudaStream_t stream : streams_) {
    static_cast<void>(cudaStreamSynchronize(stream));
    static_cast<void>(cudaStreamDestroy(stream));
  }
}

absl::StatusOr<double> BlockCopier::Run(const Copy& copy) {
  OKV_CHECK(copy.streams > 0 && copy.streams <= streams_.size());
  const absl::Time begin = absl::Now();
  for (size_t i = 0; i < copy.slots.size(); ++i) {
    const cudaError_t error = cudaMemcpyAsync(copy.to + copy.slots[i] * copy.block_bytes,
                                              copy.from + i * copy.block_bytes, copy.block_bytes,
                                              cudaMemcpyDeviceToDevice, streams_[i % copy.streams]);
    if (error != cudaSuccess)
      return CudaStatus(error, absl::StrCat("queueing the copy of block ", i));
  }
  for (uint32_t i = 0; i < copy.streams; ++i) {
    OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(streams_[i]), "copying blocks"));
  }
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

absl::Status IpcOptions::Validate() const {
  const auto refuse = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  if (blocks.blocks == 0) return refuse("--ipc_blocks is 0");
  if (blocks.block_bytes == 0 || blocks.block_bytes % sizeof(uint64_t) != 0) {
    return refuse("--ipc_block_bytes ", blocks.block_bytes, ": a multiple of 8");
  }
  if (blocks.block_bytes > kBytesMax / blocks.blocks) {
    return refuse("--ipc_blocks ", blocks.blocks, " of ", blocks.block_bytes, " bytes: more than ",
                  kBytesMax);
  }
  if (streams.empty()) return refuse("--streams is empty");
  for (const uint32_t count : streams) {
    if (count == 0 || count > kStreamsMax) {
      return refuse("--streams ", count, ": 1 to ", kStreamsMax);
    }
  }
  if (rounds < 2 || rounds > kRoundsMax) {
    return refuse("--rounds ", rounds, ": 2 to ", kRoundsMax);
  }
  return absl::OkStatus();
}

namespace {

// What RunIpc times, all of it in turn in every round. Thread-compatible.
class IpcRun {
 public:
  explicit IpcRun(const IpcOptions& options) : options_(options) {}
  absl::Status Run(IpcReport* report);

 private:
  absl::Status Prepare();
  void Add(std::string name, const BlockCopier::Copy& copy) {
    contenders_.push_back({.name = std::move(name), .copy = copy, .seconds = {}});
  }

  struct Contender {
    std::string name;
    BlockCopier::Copy copy;
    std::vector<double> seconds;
  };

  const IpcOptions& options_;
  std::unique_ptr<ScratchDirectory> directory_;
  std::unique_ptr<IpcArena> arena_;
  std::unique_ptr<BlockCopier> copier_;
  cuda::DeviceBuffer to_;
  cuda::DeviceBuffer own_;  // The same copies inside this process.
  std::vector<uint32_t> slots_;
  const std::vector<uint32_t> whole_ = {0};  // All blocks as one.
  std::vector<Contender> contenders_;
};

absl::Status IpcRun::Prepare() {
  const IpcBlocks& blocks = options_.blocks;
  OKV_ASSIGN_OR_RETURN(directory_, ScratchDirectory::Create(options_.directory));
  OKV_ASSIGN_OR_RETURN(arena_, IpcArena::Start(directory_->Path("."), blocks, options_.gpus.node));
  OKV_ASSIGN_OR_RETURN(copier_, BlockCopier::Create(*std::max_element(options_.streams.begin(),
                                                                      options_.streams.end())));
  OKV_ASSIGN_OR_RETURN(to_, AllocateDevice(blocks.bytes()));
  OKV_ASSIGN_OR_RETURN(own_, AllocateDevice(blocks.bytes()));
  // Pages that were never written may be read faster than memory allows.
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemset(own_.data(), 0x5a, blocks.bytes()), "filling memory"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemset(to_.data(), 0, blocks.bytes()), "filling memory"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "filling memory"));
  slots_ = RandomSlots(blocks.blocks, options_.seed);
  for (const uint32_t streams : options_.streams) {
    Add("blocks of another process", {.from = arena_->data(),
                                      .to = to_.data(),
                                      .slots = slots_,
                                      .block_bytes = blocks.block_bytes,
                                      .streams = streams});
  }
  Add("all of another process, one copy", {.from = arena_->data(),
                                           .to = to_.data(),
                                           .slots = whole_,
                                           .block_bytes = blocks.bytes(),
                                           .streams = 1});
  Add("blocks of this process", {.from = own_.data(),
                                 .to = to_.data(),
                                 .slots = slots_,
                                 .block_bytes = blocks.block_bytes,
                                 .streams = options_.streams.back()});
  Add("all of this process, one copy", {.from = own_.data(),
                                        .to = to_.data(),
                                        .slots = whole_,
                                        .block_bytes = blocks.bytes(),
                                        .streams = 1});
  return absl::OkStatus();
}

absl::Status IpcRun::Run(IpcReport* report) {
  OKV_RETURN_IF_ERROR(Prepare());
  for (uint32_t round = 0; round < options_.rounds; ++round) {
    for (Contender& contender : contenders_) {
      OKV_ASSIGN_OR_RETURN(const double seconds, copier_->Run(contender.copy));
      contender.seconds.push_back(seconds);
    }
  }
  for (const Contender& contender : contenders_) {
    const std::vector<double> warm(contender.seconds.begin() + 1, contender.seconds.end());
    const double bytes = static_cast<double>(options_.blocks.bytes());
    report->rates.push_back({.name = contender.name,
                             .streams = contender.copy.streams,
                             .first_bytes_per_second = bytes / contender.seconds[0],
                             .bytes_per_second = bytes / Quantile(warm, 0.5)});
  }
  // Behind the clock: the first contender's copies once more, into memory that holds nothing.
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemset(to_.data(), 0, to_.bytes()), "clearing memory"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "clearing memory"));
  OKV_RETURN_IF_ERROR(copier_->Run(contenders_[0].copy).status());
  return arena_->CheckCopy(to_.data(), slots_);
}

}  // namespace

absl::StatusOr<IpcReport> RunIpc(const IpcOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  IpcReport report;
  report.blocks = options.blocks;
  report.gpus = options.gpus;
  report.rounds = options.rounds;
  OKV_RETURN_IF_ERROR(TakeDevice(options.gpus.worker));
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(IpcRun(options).Run(&report));
  return report;
}

std::string IpcReport::ToTable() const {
  std::string table = absl::StrFormat(
      "%s, from GPU %d to %d; %d blocks of %d bytes, %.1f MB, %d rounds, GB/s one way by the wall "
      "clock\n%-36s %8s %9s %9s\n",
      device, gpus.node, gpus.worker, blocks.blocks, blocks.block_bytes,
      static_cast<double>(blocks.bytes()) / 1e6, rounds, "", "streams", "first", "median");
  for (const IpcRate& rate : rates) {
    absl::StrAppendFormat(&table, "%-36s %8d %9.1f %9.1f\n", rate.name, rate.streams,
                          rate.first_bytes_per_second / 1e9, rate.bytes_per_second / 1e9);
  }
  return table;
}

std::string IpcReport::ToJson() const {
  nlohmann::ordered_json json = {{"command", "ipc"},          {"device", device},
                                 {"worker_gpu", gpus.worker}, {"node_gpu", gpus.node},
                                 {"blocks", blocks.blocks},   {"block_bytes", blocks.block_bytes},
                                 {"rounds", rounds}};
  json["rates"] = nlohmann::ordered_json::array();
  for (const IpcRate& rate : rates) {
    json["rates"].push_back({{"name", rate.name},
                             {"streams", rate.streams},
                             {"first_bytes_per_second", rate.first_bytes_per_second},
                             {"bytes_per_second", rate.bytes_per_second}});
  }
  return json.dump();
}

}  // namespace okv

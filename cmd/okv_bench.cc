// okv-bench: measurements, one command each; --json prints one JSON object as the last line.

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/device_service.h"
#include "cmd/bench/fetch.h"
#include "cmd/bench/nll.h"
#include "cmd/bench/peer.h"
#include "cmd/bench/quality.h"
#include "cmd/support/command_flags.h"
#include "proto/status_macros.h"
#ifdef OKV_HAVE_CACHE_NODE
#include "cmd/bench/restart.h"
#include "cmd/bench/tiers.h"
#endif
#ifdef OKV_HAVE_CUDA
#include "cmd/bench/cuda_attend.h"
#include "cmd/bench/cuda_codec.h"
#include "cmd/bench/cuda_prefill.h"
#include "cmd/bench/ipc.h"
#include "cmd/bench/published_draws.h"
#endif

// What a flag's help begins with is who reads it (command_flags.h).
#define OKV_BENCH_GPU "attend, prefill, quantize, dequantize, verify, ipc, service"

ABSL_FLAG(std::string, model, "", "nll, quality: GGUF file of a Llama-family model");
ABSL_FLAG(std::string, text, "", "nll, quality: text file");
ABSL_FLAG(uint32_t, skip_tokens, 0, "nll, quality: tokens of the text to leave out first");
ABSL_FLAG(uint32_t, tokens, 32768, "nll, quality: tokens, a multiple of --window");
ABSL_FLAG(uint32_t, window, 2048, "nll, quality: tokens per sequence");
ABSL_FLAG(std::string, rotations, "", "nll, quality: name=file,name=file,...");
ABSL_FLAG(uint32_t, sink_tokens, 64, "nll: tokens at the beginning kept in BF16");
ABSL_FLAG(uint32_t, recent_tokens, 256, "nll: last tokens kept in BF16");
ABSL_FLAG(std::string, windows, "64/256", "quality: SINK/RECENT tokens in BF16, comma-separated");
ABSL_FLAG(bool, controls, false,
          "quality: also what must fail and what must pass, around the first rotation set");
ABSL_FLAG(uint32_t, recall_tokens, 2048, "quality: tokens of a passage to recall; 0 = no recall");
ABSL_FLAG(uint32_t, recall_passages, 4, "quality: passages, from the text's beginning");
ABSL_FLAG(uint32_t, threads, 0,
          "nll, quality, tiers: threads; 0 = one per core, for tiers as a node");
ABSL_FLAG(uint64_t, seed, 1, "nll, quality, " OKV_BENCH_GPU ": seed of what is drawn");
ABSL_FLAG(std::string, shapes, "1x32768,1x102400,8x32768,8x102400,32x32768,64r4096,256r4096",
          "attend: BATCHxCONTEXT, or BATCHrCONTEXT for lengths from 1 to CONTEXT, comma-separated");
ABSL_FLAG(std::string, prefill_shapes, "1x8192,1x2048+32768,1x8192+32768,1x512+32768,8x1024",
          "prefill: REQUESTSxNEW or REQUESTSxNEW+HISTORY tokens, comma-separated");
ABSL_FLAG(uint32_t, query_heads, 32, "attend, prefill, service: query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, OKV_BENCH_GPU ", fetch, peer, tiers: KV heads");
ABSL_FLAG(uint32_t, head_dim, 128, OKV_BENCH_GPU ", fetch, peer, tiers: 64, 128 or 256");
ABSL_FLAG(uint32_t, group_size, 128,
          OKV_BENCH_GPU ", fetch, peer, tiers: channels of one scale, 32 to head_dim");
ABSL_FLAG(uint32_t, query_tokens, 1, "attend: new tokens a sequence, 1 to 8");
ABSL_FLAG(uint32_t, rotation_heads, 1,
          "attend, prefill, quantize, dequantize, verify: rotations a layer, 1 or kv_heads");
ABSL_FLAG(double, query_sigma, 1.0,
          "attend, prefill: deviation of the queries; 8 gives peaky scores");
ABSL_FLAG(
    std::string, covariances, "",
    "attend: K_FILE,V_FILE: draw rows by the second moments that these published rotation files "
    "(version 1) were fitted to, with their rotations. Queries by C_Q, values by C_S; keys by "
    "C_Q too, since the files do not know the keys' own");
ABSL_FLAG(uint32_t, covariance_layer, 18, "attend: layer of --covariances, for all layers");
ABSL_FLAG(uint32_t, chunk_tokens, 8192, "quantize, dequantize: tokens, a multiple of 64");
ABSL_FLAG(uint32_t, layers, 36,
          OKV_BENCH_GPU ": layers with data of their own, one CUDA graph; peer, tiers: of a block");
ABSL_FLAG(uint32_t, rounds, 9,
          OKV_BENCH_GPU ", fetch, peer, tiers: timed rounds, the median counts");
ABSL_FLAG(std::string, transports, "tcp,self;all",
          "fetch: UCX_TLS lists of node and reader, semicolon-separated");
ABSL_FLAG(std::string, block_layers, "2,7,36", "fetch: layers of a block, which give its size");
ABSL_FLAG(std::string, in_flight, "1,8,32,0",
          "fetch, service: objects of a request; 0 = all in one");
ABSL_FLAG(uint64_t, run_bytes, uint64_t{512} << 20, "fetch: bytes of all objects");
ABSL_FLAG(std::string, perftest, "ucx_perftest", "fetch: UCX's benchmark; empty = no baseline");
ABSL_FLAG(std::string, mooncake_python, "",
          "peer: Python of an environment with mooncake-transfer-engine-non-cuda");
ABSL_FLAG(std::string, mooncake_script, "tests/bench/mooncake_peer.py", "peer: what it runs");
ABSL_FLAG(uint32_t, peer_tokens, 8192, "peer: tokens of a round, a multiple of 64");
ABSL_FLAG(uint32_t, request_blocks, 8, "peer: blocks of a put or get");
ABSL_FLAG(std::string, scratch_dir, "/tmp",
          "fetch, peer, service, ipc: where the services put their files");
ABSL_FLAG(std::string, memory, "device",
          "service: where worker and node hold blocks, device (a GPU) or host");
ABSL_FLAG(uint32_t, worker_gpu, 0, "service, ipc: the worker's GPU, by CUDA's number");
ABSL_FLAG(uint32_t, node_gpu, 0,
          "service, ipc, ipc_owner: the GPU of the node, or of the process copied from");
ABSL_FLAG(uint32_t, service_tokens, 102400, "service: tokens of history, a multiple of 64");
ABSL_FLAG(std::string, service_tls, "",
          "service: transports of node and worker, as UCX_TLS takes them; empty: their own choice");
ABSL_FLAG(bool, require_gpudirect, false,
          "service: fail where UCX would carry device memory through host memory");
ABSL_FLAG(uint32_t, put_batches, 8, "service: calls that put everything");
ABSL_FLAG(std::string, log_dir, "", "service: where the programs' logs stay; empty: nowhere");
ABSL_FLAG(std::string, streams, "1,2,4,8", "service, ipc: streams that copies are spread over");
ABSL_FLAG(uint32_t, ipc_blocks, 1600, "ipc, ipc_owner: blocks to copy");
ABSL_FLAG(uint64_t, ipc_block_bytes, 0,
          "ipc, ipc_owner: bytes of a block; 0: of an int2 block of --layers");
ABSL_FLAG(std::string, ipc_handle_file, "", "ipc_owner: where the handle goes");
ABSL_FLAG(std::string, dir, "", "tiers, restart: directory on the disk to measure");
ABSL_FLAG(uint64_t, bytes, uint64_t{1} << 30, "tiers: payload a round");
ABSL_FLAG(uint32_t, objects, 1'000'000, "restart: blocks to find again");
ABSL_FLAG(bool, json, false, "print one JSON object as the last line");

namespace okv {
namespace {

WindowsOptions TextWindows() {
  return {.model = absl::GetFlag(FLAGS_model),
          .text = absl::GetFlag(FLAGS_text),
          .skip_tokens = absl::GetFlag(FLAGS_skip_tokens),
          .tokens = absl::GetFlag(FLAGS_tokens),
          .window = absl::GetFlag(FLAGS_window),
          .threads = absl::GetFlag(FLAGS_threads),
          .seed = absl::GetFlag(FLAGS_seed)};
}

template <class Report>
absl::Status Print(const absl::StatusOr<Report>& report) {
  if (!report.ok()) return report.status();
  std::printf("%s", report->ToTable().c_str());
  if (absl::GetFlag(FLAGS_json)) std::printf("%s\n", report->ToJson().c_str());
  return absl::OkStatus();
}

absl::Status Nll() {
  NllOptions options = {.windows = TextWindows(),
                        .rotations = {},
                        .sink_tokens = absl::GetFlag(FLAGS_sink_tokens),
                        .recent_tokens = absl::GetFlag(FLAGS_recent_tokens)};
  OKV_ASSIGN_OR_RETURN(options.rotations, ParseRotationsFlag(absl::GetFlag(FLAGS_rotations)));
  return Print(RunNll(options));
}

absl::Status Quality() {
  QualityOptions options = {.text = TextWindows(),
                            .rotations = {},
                            .windows = {},
                            .controls = absl::GetFlag(FLAGS_controls),
                            .recall_tokens = absl::GetFlag(FLAGS_recall_tokens),
                            .recall_passages = absl::GetFlag(FLAGS_recall_passages)};
  OKV_ASSIGN_OR_RETURN(options.rotations, ParseRotationsFlag(absl::GetFlag(FLAGS_rotations)));
  OKV_ASSIGN_OR_RETURN(options.windows, ParseWindowsFlag(absl::GetFlag(FLAGS_windows)));
  return Print(RunQuality(options));
}

absl::Status Fetch() {
  FetchOptions options;
  options.transports = absl::StrSplit(absl::GetFlag(FLAGS_transports), ';');
  OKV_ASSIGN_OR_RETURN(options.layers,
                       ParseCounts("--block_layers", absl::GetFlag(FLAGS_block_layers)));
  OKV_ASSIGN_OR_RETURN(options.in_flight,
                       ParseCounts("--in_flight", absl::GetFlag(FLAGS_in_flight)));
  options.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  options.head_dim = absl::GetFlag(FLAGS_head_dim);
  options.group_size = absl::GetFlag(FLAGS_group_size);
  options.run_bytes = absl::GetFlag(FLAGS_run_bytes);
  options.rounds = absl::GetFlag(FLAGS_rounds);
  options.perftest = absl::GetFlag(FLAGS_perftest);
  options.directory = absl::GetFlag(FLAGS_scratch_dir);
  return Print(RunFetch(options));
}

GpuPair GpusFromFlags() {
  return {.worker = absl::GetFlag(FLAGS_worker_gpu), .node = absl::GetFlag(FLAGS_node_gpu)};
}

absl::Status Service() {
  ServiceOptions options;
  options.gpus = GpusFromFlags();
  options.memory = absl::GetFlag(FLAGS_memory);
  options.tokens = absl::GetFlag(FLAGS_service_tokens);
  options.shape = {.layers = absl::GetFlag(FLAGS_layers),
                   .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                   .head_dim = absl::GetFlag(FLAGS_head_dim),
                   .group_size = absl::GetFlag(FLAGS_group_size)};
  options.query_heads = absl::GetFlag(FLAGS_query_heads);
  OKV_ASSIGN_OR_RETURN(options.in_flight,
                       ParseCounts("--in_flight", absl::GetFlag(FLAGS_in_flight)));
  OKV_ASSIGN_OR_RETURN(options.streams, ParseCounts("--streams", absl::GetFlag(FLAGS_streams)));
  options.rounds = absl::GetFlag(FLAGS_rounds);
  options.put_batches = absl::GetFlag(FLAGS_put_batches);
  options.tls = absl::GetFlag(FLAGS_service_tls);
  options.require_gpudirect = absl::GetFlag(FLAGS_require_gpudirect);
  options.directory = absl::GetFlag(FLAGS_scratch_dir);
  options.log_directory = absl::GetFlag(FLAGS_log_dir);
  options.seed = absl::GetFlag(FLAGS_seed);
  ServiceModelFactory make_model = CreateHostModel;
  if (options.memory != "host") {
    if (options.memory != "device") {
      return absl::InvalidArgumentError(
          absl::StrCat("--memory '", options.memory, "': device or host"));
    }
#ifdef OKV_HAVE_CUDA
    make_model = CreateCudaModel;
#else
    return absl::UnimplementedError("--memory device: this okv-bench was built without CUDA");
#endif
  }
  OKV_ASSIGN_OR_RETURN(const ServiceReport report, RunService(options, make_model));
  OKV_RETURN_IF_ERROR(Print<ServiceReport>(report));
  if (report.error.empty()) return absl::OkStatus();
  return absl::InternalError(report.error);
}

absl::Status Peer() {
  return Print(RunPeer({.python = absl::GetFlag(FLAGS_mooncake_python),
                        .script = absl::GetFlag(FLAGS_mooncake_script),
                        .tokens = absl::GetFlag(FLAGS_peer_tokens),
                        .request_blocks = absl::GetFlag(FLAGS_request_blocks),
                        .rounds = absl::GetFlag(FLAGS_rounds),
                        .layers = absl::GetFlag(FLAGS_layers),
                        .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                        .head_dim = absl::GetFlag(FLAGS_head_dim),
                        .group_size = absl::GetFlag(FLAGS_group_size),
                        .directory = absl::GetFlag(FLAGS_scratch_dir)}));
}

#ifdef OKV_HAVE_CACHE_NODE
absl::Status TiersBench() {
  const uint32_t threads = absl::GetFlag(FLAGS_threads);
  return Print(RunTiers({.directory = absl::GetFlag(FLAGS_dir),
                         .shape = {.layers = absl::GetFlag(FLAGS_layers),
                                   .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                                   .head_dim = absl::GetFlag(FLAGS_head_dim),
                                   .group_size = absl::GetFlag(FLAGS_group_size)},
                         .bytes = absl::GetFlag(FLAGS_bytes),
                         .threads = threads == 0 ? 2 : threads,
                         .rounds = absl::GetFlag(FLAGS_rounds)}));
}
absl::Status RestartBench() {
  return Print(
      RunRestart({.directory = absl::GetFlag(FLAGS_dir), .objects = absl::GetFlag(FLAGS_objects)}));
}
#else
absl::Status WithoutNode() {
  return absl::UnimplementedError("this okv-bench was built without cache_node");
}
constexpr auto TiersBench = WithoutNode;
constexpr auto RestartBench = WithoutNode;
#endif

#ifdef OKV_HAVE_CUDA
template <class Options>
absl::Status CudaBench(const Options& options,
                       absl::StatusOr<CudaBenchReport> (*run)(const Options&)) {
  return Print(run(options));
}

absl::Status AttendBench() {
  CudaAttendOptions options = {.shapes = absl::GetFlag(FLAGS_shapes),
                               .query_heads = absl::GetFlag(FLAGS_query_heads),
                               .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                               .head_dim = absl::GetFlag(FLAGS_head_dim),
                               .group_size = absl::GetFlag(FLAGS_group_size),
                               .query_tokens = absl::GetFlag(FLAGS_query_tokens),
                               .rotation_heads = absl::GetFlag(FLAGS_rotation_heads),
                               .query_sigma = static_cast<float>(absl::GetFlag(FLAGS_query_sigma)),
                               .draws = std::nullopt,
                               .draws_name = "",
                               .layers = absl::GetFlag(FLAGS_layers),
                               .rounds = absl::GetFlag(FLAGS_rounds),
                               .seed = absl::GetFlag(FLAGS_seed)};
  if (const std::string files = absl::GetFlag(FLAGS_covariances); !files.empty()) {
    const std::vector<std::string> names = absl::StrSplit(files, ',');
    if (names.size() != 2) return absl::InvalidArgumentError("--covariances: K_FILE,V_FILE");
    const uint32_t layer = absl::GetFlag(FLAGS_covariance_layer);
    OKV_ASSIGN_OR_RETURN(
        options.draws,
        LoadPublishedDraws({.k_file = names[0], .v_file = names[1], .layer = layer}));
    options.draws_name =
        absl::StrCat(std::filesystem::path(names[0]).filename().string(), ", layer ", layer);
  }
  return CudaBench(options, RunCudaAttend);
}

absl::Status PrefillBench() {
  return Print(RunCudaPrefill({.shapes = absl::GetFlag(FLAGS_prefill_shapes),
                               .query_heads = absl::GetFlag(FLAGS_query_heads),
                               .kv_heads = absl::GetFlag(FLAGS_kv_heads),
                               .head_dim = absl::GetFlag(FLAGS_head_dim),
                               .group_size = absl::GetFlag(FLAGS_group_size),
                               .rotation_heads = absl::GetFlag(FLAGS_rotation_heads),
                               .query_sigma = static_cast<float>(absl::GetFlag(FLAGS_query_sigma)),
                               .layers = absl::GetFlag(FLAGS_layers),
                               .rounds = absl::GetFlag(FLAGS_rounds),
                               .seed = absl::GetFlag(FLAGS_seed)}));
}

CudaCodecOptions CodecOptions() {
  return {.kv_heads = absl::GetFlag(FLAGS_kv_heads),
          .head_dim = absl::GetFlag(FLAGS_head_dim),
          .group_size = absl::GetFlag(FLAGS_group_size),
          .rotation_heads = absl::GetFlag(FLAGS_rotation_heads),
          .layers = absl::GetFlag(FLAGS_layers),
          .chunk_tokens = absl::GetFlag(FLAGS_chunk_tokens),
          .rounds = absl::GetFlag(FLAGS_rounds),
          .seed = absl::GetFlag(FLAGS_seed)};
}
absl::Status QuantizeBench() { return CudaBench(CodecOptions(), RunCudaQuantize); }
absl::Status DequantizeBench() { return CudaBench(CodecOptions(), RunCudaDequantize); }
absl::Status VerifyBench() { return CudaBench(CodecOptions(), RunCudaVerify); }

IpcBlocks IpcBlocksFromFlags() {
  IpcBlocks blocks = {.block_bytes = absl::GetFlag(FLAGS_ipc_block_bytes),
                      .blocks = absl::GetFlag(FLAGS_ipc_blocks)};
  if (blocks.block_bytes == 0)
    blocks.block_bytes = CodecOptions().layout().block_bytes(Codec::kInt2);
  return blocks;
}
absl::Status IpcBench() {
  IpcOptions options = {.blocks = IpcBlocksFromFlags(),
                        .gpus = GpusFromFlags(),
                        .streams = {},
                        .rounds = absl::GetFlag(FLAGS_rounds),
                        .directory = absl::GetFlag(FLAGS_scratch_dir),
                        .seed = absl::GetFlag(FLAGS_seed)};
  OKV_ASSIGN_OR_RETURN(options.streams, ParseCounts("--streams", absl::GetFlag(FLAGS_streams)));
  return Print(RunIpc(options));
}
// The other process of ipc and service.
absl::Status IpcOwner() {
  return RunIpcOwner(IpcBlocksFromFlags(), GpusFromFlags().node,
                     absl::GetFlag(FLAGS_ipc_handle_file));
}
#else
absl::Status WithoutCuda() {
  return absl::UnimplementedError("it needs a GPU, and this okv-bench was built without CUDA");
}
constexpr auto AttendBench = WithoutCuda;
constexpr auto PrefillBench = WithoutCuda;
constexpr auto QuantizeBench = WithoutCuda;
constexpr auto DequantizeBench = WithoutCuda;
constexpr auto VerifyBench = WithoutCuda;
constexpr auto IpcBench = WithoutCuda;
constexpr auto IpcOwner = WithoutCuda;
#endif

struct Command {
  const char* name;
  absl::Status (*run)();
};
constexpr Command kCommands[] = {{"nll", Nll},
                                 {"quality", Quality},
                                 {"attend", AttendBench},
                                 {"prefill", PrefillBench},
                                 {"quantize", QuantizeBench},
                                 {"dequantize", DequantizeBench},
                                 {"verify", VerifyBench},
                                 {"ipc", IpcBench},
                                 {"ipc_owner", IpcOwner},
                                 {"service", Service},
                                 {"fetch", Fetch},
                                 {"peer", Peer},
                                 {"tiers", TiersBench},
                                 {"restart", RestartBench}};

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "okv-bench "
      "nll|quality|attend|prefill|quantize|dequantize|verify|ipc|service|fetch|peer|tiers|"
      "restart "
      "[flags]; --helpfull lists the flags");
  const std::vector<const char*> arguments(argv, argv + argc);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  const std::string name = words.size() == 2 ? words[1] : "";
  std::vector<absl::string_view> commands;
  for (const okv::Command& command : okv::kCommands) commands.push_back(command.name);
  for (const okv::Command& command : okv::kCommands) {
    if (name != command.name) continue;
    absl::Status status = okv::CheckFlagsOf(name, commands, arguments);
    if (status.ok()) status = command.run();
    if (status.ok()) return 0;
    std::fprintf(stderr, "okv-bench: error: %s: %s\n", command.name, status.ToString().c_str());
    return 1;
  }
  std::fprintf(stderr, "okv-bench: error: one command is needed: %s\n",
               absl::StrJoin(commands, " ").c_str());
  return 2;
}

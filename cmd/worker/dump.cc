#include "cmd/worker/dump.h"

#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/dump.h"
#include "cmd/engine/model.h"
#include "cmd/engine/tokenizer.h"
#include "cmd/support/kv.h"
#include "proto/status_macros.h"

namespace okv {

absl::Status DumpOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is missing");
  if (text.empty()) return absl::InvalidArgumentError("--text is missing");
  if (out.empty()) return absl::InvalidArgumentError("--out is missing");
  OKV_RETURN_IF_ERROR(ValidateThreads(threads));
  if (window == 0 || tokens == 0 || tokens % window != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens ", tokens, " is not a multiple of --window ", window));
  }
  return absl::OkStatus();
}

absl::Status RunDump(const DumpOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  ThreadPool pool(options.threads != 0 ? options.threads
                                       : std::max(1u, std::thread::hardware_concurrency()));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options.model, &pool));
  const ModelConfig& config = model->config();
  OKV_ASSIGN_OR_RETURN(
      const std::vector<uint32_t> tokens,
      ReadTokens(
          model->tokenizer(), options.text,
          {.skip_tokens = options.skip_tokens, .tokens_count = options.tokens, .rest_too = true}));

  const RotationSet identity = IdentityRotations(config);
  const Format format = MakeFormat(config, identity, {.recent_tokens = kBf16RecentTokens});
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DumpWriter> dump,
                       DumpWriter::Create(options.out, {.model = config.name,
                                                        .weights_revision = config.weights_revision,
                                                        .text_source = options.text,
                                                        .layer_ids = format.layer_ids,
                                                        .query_heads = config.query_heads,
                                                        .kv_heads = config.kv_heads,
                                                        .head_dim = config.head_dim}));
  const uint64_t windows = options.tokens / options.window;
  for (uint64_t i = 0; i < windows; ++i) {
    // One part of a text is not like another: the sequences come from all of it.
    const uint64_t room = tokens.size() - options.window;
    const uint64_t first = windows == 1 ? 0 : i * room / (windows - 1);
    OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Sequence> sequence,
                         MakeSequence(config, format, &identity, options.window, &pool));
    SequenceCache cache(sequence.get(), dump.get());
    const auto window = absl::MakeConstSpan(tokens).subspan(first, options.window);
    OKV_RETURN_IF_ERROR(model->Forward(window, &cache).status());
    OKV_RETURN_IF_ERROR(dump->EndSequence());
    std::fprintf(stderr, "okv-worker dump: %u of %u tokens\n",
                 static_cast<uint32_t>(i + 1) * options.window, options.tokens);
  }
  return dump->Finish();
}

}  // namespace okv

#ifndef OKV_TESTS_CMD_BENCH_TINY_H_
#define OKV_TESTS_CMD_BENCH_TINY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cmd/bench/contender.h"
#include "cmd/engine/model.h"
#include "kernels/thread_pool.h"
#include "proto/rotation_set.h"

namespace okv::testing_support {

// The tiny model in a file, and loaded from it.
std::string WriteTinyModel();
std::unique_ptr<Model> LoadTiny(ThreadPool* pool);

// For the tiny model: "none", "hadamard", or "mixed", which has Hadamard in its first layer only.
RotationSet TinyRotations(const ModelConfig& config, const std::string& method);
Contender TinyContender(const ModelConfig& config, const std::string& method,
                        const ContenderOptions& options);

std::vector<uint32_t> RandomTokens(size_t count, uint64_t seed);
// Text of which every letter is a token or part of one.
std::string RandomText(size_t letters, uint64_t seed);

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CMD_BENCH_TINY_H_

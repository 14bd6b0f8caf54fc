// Checks the rules of the project's style that a program can check, over every file of the tree.
// Each rule is first shown a sample that breaks it and one that does not.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "tests/tidy/rules.h"
#include "tests/tidy/source_file.h"

namespace okv::tidy {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolders[] = {"proto",         "kernels",    "client", "calib",
                                    "control_plane", "cache_node", "cmd",    "tests",
                                    "deploy",        "cmake",      ".ci"};

std::string Repeat(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

// A header with a correct include guard around `body`.
std::string Header(const std::string& guard, const std::string& body) {
  return "#ifndef " + guard + "\n#define " + guard + "\n" + body + "#endif  // " + guard + "\n";
}

std::vector<std::string> RulesBroken(const Files& files) {
  std::vector<std::string> rules;
  for (const Violation& violation : CheckAll(files)) rules.push_back(violation.rule);
  return rules;
}

// `text` as the whole of a tree, built by a CMakeLists.txt that names it.
Files TreeOf(const std::string& path, const std::string& text) {
  const SourceFile file = MakeSourceFile(path, text);
  const std::string folder(TopFolder(path));
  return {file, MakeSourceFile(folder + "/CMakeLists.txt",
                               "a(" + path.substr(folder.size() + 1) + ")\n")};
}

struct Sample {
  const char* rule;
  const char* path;
  std::string bad;
  std::string good;
};

std::vector<Sample> Samples() {
  const std::string reason = "tidy:allow(line-length): the table is read in columns\n";
  return {
      {"include-direction", "client/a.cc", "#include \"cache_node/a.h\"\n",
       "#include \"kernels/a.h\"\n"},
      {"include-direction", "control_plane/a.cc", "#include \"cache_node/a.h\"\n",
       "#include \"client/a.h\"\n"},
      {"include-direction", "cache_node/a.cc", "#include \"control_plane/a.h\"\n",
       "#include \"proto/a.h\"\n"},
      {"include-direction", "calib/a.cc", "#include \"client/a.h\"\n",
       "#include \"kernels/a.h\"\n"},
      {"include-direction", "proto/a.cc", "#include \"kernels/a.h\"\n", "#include \"proto/a.h\"\n"},
      {"include-direction", "cmd/a.cc", "#include \"tests/a.h\"\n",
       "#include \"cache_node/a.h\"\n"},
      {"include-direction", "proto/b.cc", "#include \"b.h\"\n", "#include <vector>\n"},
      {"library-home", "cache_node/a.cc", "#include <rocksdb/db.h>\n", "#include <vector>\n"},
      {"library-home", "cache_node/tiers/arena_tier.cc", "#include <ucp/api/ucp.h>\n", "int a;\n"},
      {"library-home", "kernels/a.cc", "#include <grpcpp/grpcpp.h>\n",
       "#include <hwy/highway.h>\n"},
      {"leftover", "proto/a.cc", std::string("// TO") + "DO: later\n",
       "// todo lists are elsewhere\n"},
      {"leftover", "proto/a.proto", std::string("// FIX") + "ME\n", "// fixed\n"},
      {"place", "deploy/a.md", std::string("see /wo") + "rk/main\n",
       "see build/work/main, $root/work/x\n"},
      {"place", "deploy/a.md", std::string("see /ro") + "ot/x\n", "the root/x folder\n"},
      {"place", "deploy/a.md", std::string("from pypi") + ".org\n", "from PyPI\n"},
      {"line-length", "proto/a.cc", "// " + Repeat("x", 98) + "\n", "// " + Repeat("x", 97) + "\n"},
      {"line-length", "proto/a.cc", "// " + Repeat("\u00b7", 98) + "\n",
       "// " + Repeat("\u00b7", 97) + "\n"},
      {"file-length", "proto/a.cc", Repeat("int a;\n", 801), Repeat("int a;\n", 800)},
      {"function-length", "proto/a.cc", "int F() {\n" + Repeat("  G();\n", 69) + "}\n",
       "int F() {\n" + Repeat("  G();\n", 68) + "}\n"},
      {"include-guard", "proto/a.h", Header("OKV_A_H_", "int a;\n"),
       Header("OKV_PROTO_A_H_", "int a;\n")},
      {"include-guard", "proto/a.h", "#pragma once\nint a;\n",
       Header("OKV_PROTO_A_H_", "// Why.\n")},
      {"cuda-include", "kernels/a.cu", "#include \"absl/status/status.h\"\n",
       "#include <cstdint>\n"},
      {"cuda-include", "kernels/a.cu", "#include <vector>\n", "#include \"kernels/a.h\"\n"},
      {"whitespace", "proto/a.md", "a\tb\n", "a b\n"},
      {"whitespace", "proto/a.md", "a \n", "a\n"},
      {"whitespace", "proto/a.md", "a", "a\n"},
      {"whitespace", "proto/a.md", "a\r\n", "a\n"},
      {"whitespace", "proto/a.md", "a\n\n", "a\n\nb\n"},
      {"document-path", "deploy/a.md", "see `proto/no.h`\n", "see `deploy/a.md`, `deploy/a`\n"},
      {"script", "deploy/a.sh", "set -euo pipefail\n", ""},
      {"allow", "proto/a.cc", "// tidy:allow(no-such-rule): a reason of some length\n",
       "// " + reason},
      {"allow", "proto/a.cc", "// tidy:allow(line-length)\n", "// " + reason},
      {"ownership", "proto/a.cc", "int* a = new int;\n",
       "auto a = std::unique_ptr<int>(new int);\n"},
      {"ownership", "proto/a.cc", "  delete a;\n", "  A(const A&) = delete;\n"},
  };
}

std::vector<Sample> BanSamples() {
  return {
      {"ban", "client/a.cc", "auto a = getenv(b);\n", "// getenv(b)\n"},
      {"ban", "client/a.cc", "std::cout << a;\n", "Print(\"std::cout\");\n"},
      {"ban", "client/a.cc", "  throw a;\n", "  throws(a);\n"},
      {"ban", "client/a.cc", "  try { F();\n  }\n", "  retry();\n"},
      {"ban", "client/a.cc", "  } catch (...) {\n", "  catch_up();\n"},
      {"ban", "client/a.cc", "std::this_thread::sleep_for(a);\n", "clock->Now();\n"},
      {"ban", "client/a.cc", "std::this_thread::sleep_until(a);\n", "clock->Now();\n"},
      {"ban", "tests/a.cc", "usleep(10);\n", "int usleeps;\n"},
      {"ban", "tests/a.cc", "nanosleep(&a, &b);\n", "cv.Wait(&mu);\n"},
      {"ban", "tests/a.cc", "absl::SleepFor(a);\n", "cv.Wait(&mu);\n"},
      {"ban", "client/a.cc", "absl::Mutex mu;\n", "okv::Mutex mu;\n"},
      {"ban", "client/a.cc", "absl::MutexLock lock(&mu);\n", "MutexLock lock(&mu);\n"},
      {"ban", "client/a.cc", "absl::CondVar cv;\n", "CondVar cv;\n"},
      {"ban", "tests/a.cc", "int a = rand();\n", "int a = random.rand();\n"},
      {"ban", "tests/a.cc", "srand(1);\n", "int rand;\n"},
      {"ban", "cmd/a.cc", "std::regex a;\n", "std::string a;\n"},
      {"ban", "cmd/a.cc", "using namespace std;\n", "using std::string;\n"},
      {"ban", "cmd/a.cc", "assert(a);\n", "static_assert(a);\n"},
      {"ban", "cmd/a.cc", "int slab;\n", "int block;\n"},
      {"ban", "cmd/a.cc", "int offload;\n", "int spill;\n"},
  };
}

std::vector<Sample> AllSamples() {
  std::vector<Sample> samples = Samples();
  for (const Sample& sample : BanSamples()) samples.push_back(sample);
  return samples;
}

TEST(TidyRulesTest, EverySampleThatBreaksARuleIsCaughtAndEveryGoodOnePasses) {
  for (const Sample& sample : AllSamples()) {
    SCOPED_TRACE(std::string(sample.rule) + " in " + sample.path + ": " + sample.bad);
    const std::vector<std::string> broken = RulesBroken(TreeOf(sample.path, sample.bad));
    EXPECT_EQ(std::count(broken.begin(), broken.end(), sample.rule), 1);
    EXPECT_EQ(broken.size(), 1u) << "another rule sees something too: " << broken.back();
    if (sample.good.empty()) continue;
    const Violations found = CheckAll(TreeOf(sample.path, sample.good));
    EXPECT_TRUE(found.empty()) << found[0].ToString();
  }
}

TEST(TidyRulesTest, EveryRuleHasASample) {
  std::set<std::string> sampled = {"built"};  // It needs a tree: tested below.
  for (const Sample& sample : AllSamples()) sampled.insert(sample.rule);
  for (const Rule& rule : AllRules()) EXPECT_EQ(sampled.count(rule.name), 1u) << rule.name;
}

TEST(TidyRulesTest, WhatACudaFileIncludesThroughAHeaderOfOursIsSeen) {
  const std::string heavy = Header("OKV_PROTO_A_H_", "#include \"absl/status/status.h\"\n");
  const std::string light = Header("OKV_PROTO_A_H_", "#include <cstdint>\n");
  for (const auto& [header, count] : {std::pair(heavy, 1), std::pair(light, 0)}) {
    Files files = TreeOf("kernels/a.cu", "#include \"proto/a.h\"\n");
    files.push_back(MakeSourceFile("proto/a.h", header));
    EXPECT_EQ(static_cast<int>(RulesBroken(files).size()), count) << header;
  }
}

TEST(TidyRulesTest, ASourceFileThatNoCMakeListsNamesIsSeen) {
  const SourceFile lists = MakeSourceFile("proto/CMakeLists.txt", "lib(SOURCES a.cc sub/b.cc)\n");
  EXPECT_TRUE(RulesBroken({lists, MakeSourceFile("proto/a.cc", "")}).empty());
  EXPECT_TRUE(RulesBroken({lists, MakeSourceFile("proto/sub/b.cc", "")}).empty());
  EXPECT_EQ(RulesBroken({lists, MakeSourceFile("proto/c.cc", "")}),
            std::vector<std::string>{"built"});
  EXPECT_EQ(RulesBroken({lists, MakeSourceFile("kernels/a.cc", "")}),
            std::vector<std::string>{"built"});
}

TEST(TidyRulesTest, AnExecutableStrictScriptPasses) {
  SourceFile script = MakeSourceFile("deploy/a.sh", "#!/usr/bin/env bash\nset -euo pipefail\n");
  EXPECT_EQ(RulesBroken({script}), std::vector<std::string>{"script"});
  script.executable = true;
  EXPECT_TRUE(RulesBroken({script}).empty());
  SourceFile lax = MakeSourceFile("deploy/a.sh", "#!/usr/bin/env bash\nset -e\n");
  lax.executable = true;
  EXPECT_EQ(RulesBroken({lax}), std::vector<std::string>{"script"});
}

TEST(TidyRulesTest, AnAllowMarkWithAReasonAllowsItsRuleOnTheNextLineOnly) {
  const std::string mark = "// tidy:allow(ban): the loader wants this very call\n";
  const std::string call = "auto a = getenv(b);\n";
  EXPECT_TRUE(RulesBroken(TreeOf("client/a.cc", mark + call)).empty());
  EXPECT_EQ(RulesBroken(TreeOf("client/a.cc", mark + call + call)).size(), 1u);
  EXPECT_EQ(RulesBroken(TreeOf("client/a.cc", "// tidy:allow(ban): short\n" + call)).size(), 2u);
}

TEST(TidyFunctionsTest, FindsFunctionsInNamespacesAndClassesWithTheirLines) {
  const SourceFile file = MakeSourceFile("proto/a.cc", R"(
namespace a {
template <class T>
int F(T t = {}) {
  auto g = [] { return 1; };
  if (t) { return 1; }
  return 0;
}
class B : public C {
 public:
  B(int x) : b_{x}, c_(x) {
    G();
  }
  bool operator==(const B& o) const { return true; }
  int operator()(int a) const { return a; }

 private:
  int b_ = {1};
  struct D { int e; };
};
const int kList[] = {
  1, 2,
};
const auto kLambda = [](int a) {
  return a;
};
#define MACRO(x) { \
  x
TEST(A, B) {
  EXPECT_TRUE("}" == x);
}
absl::Status F(const A& a,
               int b) ABSL_LOCKS_EXCLUDED(mu_) {
  return '{';
}
}  // namespace a
)");
  const std::vector<Function> functions = Functions(file);
  std::vector<std::pair<int, int>> lines;
  for (const Function& function : functions)
    lines.emplace_back(function.first_line, function.last_line);
  const std::vector<std::pair<int, int>> expected = {{3, 8},   {11, 13}, {14, 14},
                                                     {15, 15}, {29, 31}, {32, 35}};
  EXPECT_EQ(lines, expected);
}

TEST(TidySourceFileTest, CommentsAndLiteralsAreNoCode) {
  const SourceFile file = MakeSourceFile("proto/a.cc",
                                         "#include \"proto/b.h\"\n"
                                         "int a; // x\n"
                                         "f(\"x\\\"x\", 'x'); /* x\n"
                                         "x */ g(1'000, R\"y(x\")y\");\n");
  for (const std::string& line : file.code)
    EXPECT_EQ(FindWord(line, "x"), std::string::npos) << line;
  EXPECT_EQ(file.code[0], "#include \"proto/b.h\"");
  EXPECT_NE(file.code[3].find("g(1'000"), std::string::npos);
  ASSERT_EQ(Includes(file).size(), 1u);
  EXPECT_EQ(Includes(file)[0].name, "proto/b.h");
}

// The text files of the tree: of its folders, and of the root itself.
Files ReadTree(const fs::path& root) {
  std::vector<fs::path> paths;
  for (const char* folder : kFolders) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (entry.is_regular_file() && !entry.is_symlink()) paths.push_back(entry.path());
    }
  }
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename();
    if (entry.is_regular_file() && name != ".git" && name != "compile_commands.json")
      paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  Files files;
  for (const fs::path& path : paths) {
    std::ifstream stream(path, std::ios::binary);
    std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    const bool binary = text.find('\0') != std::string::npos || path.extension() == ".pyc";
    if (binary) continue;
    files.push_back(MakeSourceFile(fs::relative(path, root), std::move(text)));
    files.back().executable =
        (fs::status(path).permissions() & fs::perms::owner_exec) != fs::perms::none;
  }
  return files;
}

TEST(TidyTreeTest, TheTreeKeepsEveryRule) {
  const char* root = std::getenv("OKV_SOURCE_DIR");
  ASSERT_NE(root, nullptr) << "OKV_SOURCE_DIR names the root of the source tree";
  const Files files = ReadTree(root);
  ASSERT_TRUE(
      std::any_of(files.begin(), files.end(),
                  [](const SourceFile& file) { return file.path == "tests/tidy/tidy_test.cc"; }))
      << "the tree at " << root << " was not read";
  std::string report;
  for (const Violation& violation : CheckAll(files)) report += violation.ToString() + "\n";
  EXPECT_TRUE(report.empty()) << report;
}

}  // namespace
}  // namespace okv::tidy

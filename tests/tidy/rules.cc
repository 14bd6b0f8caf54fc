#include "tests/tidy/rules.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace okv::tidy {
namespace {

constexpr int kFileLinesMax = 800;
constexpr int kFunctionLinesMax = 70;
constexpr int kColumnsMax = 100;

using Names = std::vector<std::string_view>;

bool Contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool InTests(const SourceFile& file) { return TopFolder(file.path) == "tests"; }

// The folders a folder may include: the direction is cmd > {control_plane, cache_node} > client >
// kernels > proto, and calib > kernels > proto.
const std::map<std::string_view, Names>& AllowedIncludes() {
  static const std::map<std::string_view, Names> allowed = {
      {"proto", {"proto"}},
      {"kernels", {"proto", "kernels"}},
      {"client", {"proto", "kernels", "client"}},
      {"calib", {"proto", "kernels", "calib"}},
      {"control_plane", {"proto", "kernels", "client", "control_plane"}},
      {"cache_node", {"proto", "kernels", "client", "cache_node"}},
      {"cmd", {"proto", "kernels", "client", "calib", "control_plane", "cache_node", "cmd"}},
      {"tests",
       {"proto", "kernels", "client", "calib", "control_plane", "cache_node", "cmd", "tests"}},
  };
  return allowed;
}

// An outside library and the files that may include it; tests may include what they test.
struct Home {
  std::string_view header_prefix;
  Names path_prefixes;
};

const std::vector<Home>& LibraryHomes() {
  static const std::vector<Home> homes = {
      {"rocksdb/",
       {"cache_node/tiers/rocksdb_tier.", "control_plane/state_rocksdb.", "proto/rocksdb_log."}},
      {"ucp/", {"client/transport/ucx_"}},
      {"uct/", {"client/transport/ucx_"}},
      {"ucs/", {"client/transport/ucx_"}},
      {"ucm/", {"client/transport/ucx_"}},
      {"grpcpp/", {"client/", "control_plane/", "cache_node/", "cmd/", "proto/control_channel."}},
      {"grpc/", {"client/", "control_plane/", "cache_node/", "cmd/"}},
      {"prometheus/", {"client/", "control_plane/", "cache_node/", "cmd/"}},
      {"hwy/", {"kernels/", "cmd/engine/"}},
      {"cuda", {"kernels/", "client/", "cache_node/", "calib/", "cmd/"}},
      {"cublas", {"calib/cuda/", "cmd/bench/"}},
      {"nccl", {"client/", "calib/", "cmd/"}},
  };
  return homes;
}

// A construct that may not stand in code, but for the exempt folders.
struct Ban {
  std::string_view word;
  Names exempt_folders;
  std::string_view instead;
};

const std::vector<Ban>& Bans() {
  static const std::vector<Ban> bans = {
      {"getenv", {"tests"}, "fill Options from flags"},
      {"std::cout", {"tests", "cmd"}, "a library returns what it has to say"},
      {"throw", {"tests"}, "return absl::Status"},
      {"try", {"tests"}, "return absl::Status; nothing is thrown"},
      {"catch", {"tests"}, "return absl::Status; nothing is thrown"},
      {"sleep_for", {"cmd"}, "take a Clock, or wait for a condition"},
      {"sleep_until", {"cmd"}, "take a Clock, or wait for a condition"},
      {"usleep", {}, "take a Clock, or wait for a condition"},
      {"nanosleep", {}, "take a Clock, or wait for a condition"},
      {"absl::SleepFor", {}, "take a Clock, or wait for a condition"},
      {"absl::Mutex", {}, "okv::Mutex, which ThreadSanitizer can see"},
      {"absl::MutexLock", {}, "okv::MutexLock, which ThreadSanitizer can see"},
      {"absl::CondVar", {}, "okv::CondVar, which ThreadSanitizer can see"},
      {"rand", {}, "a seeded std::mt19937_64"},
      {"srand", {}, "a seeded std::mt19937_64"},
      {"std::regex", {}, "a hand-written parser: std::regex is slow and recursive"},
      {"using namespace std", {}, "name what is used"},
      {"assert", {}, "OKV_CHECK, which release builds keep"},
      {"slab", {}, "the word is block"},
      {"offload", {}, "the word is spill or demote"},
  };
  return bans;
}

void Add(const SourceFile& file, int line, const Rule& rule, std::string text, Violations* out) {
  out->push_back({.path = file.path, .line = line, .rule = rule.name, .text = std::move(text)});
}

void CheckIncludeDirection(const SourceFile& file, const Files&, const Rule& rule,
                           Violations* out) {
  const auto allowed = AllowedIncludes().find(TopFolder(file.path));
  if (allowed == AllowedIncludes().end()) return;
  for (const Include& include : Includes(file)) {
    const std::string_view folder = TopFolder(include.name);
    if (include.quoted && folder.empty()) {
      Add(file, include.line, rule, "\"" + include.name + "\" is not written from the root", out);
    } else if (AllowedIncludes().count(folder) > 0 && !Contains(allowed->second, folder)) {
      Add(file, include.line, rule,
          std::string(TopFolder(file.path)) + " may not include " + std::string(folder), out);
    }
  }
}

void CheckLibraryHome(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  if (InTests(file)) return;
  for (const Include& include : Includes(file)) {
    for (const Home& home : LibraryHomes()) {
      if (!HasPrefix(include.name, home.header_prefix)) continue;
      const bool at_home = std::any_of(home.path_prefixes.begin(), home.path_prefixes.end(),
                                       [&](std::string_view p) { return HasPrefix(file.path, p); });
      if (!at_home) Add(file, include.line, rule, include.name + " has another home", out);
    }
  }
}

// What gives `rand` and `assert` their meaning is the call.
bool IsBanned(std::string_view line, const Ban& ban) {
  for (size_t at = FindWord(line, ban.word); at != std::string_view::npos;
       at = FindWord(line, ban.word, at + 1)) {
    const size_t next = line.find_first_not_of(' ', at + ban.word.size());
    const bool is_call = next != std::string_view::npos && line[next] == '(';
    const bool needs_call = ban.word == "rand" || ban.word == "srand" || ban.word == "assert";
    const bool is_member =
        at > 0 && (line[at - 1] == '.' || (at > 1 && line.substr(at - 2, 2) == "->"));
    if (!needs_call || (is_call && !is_member)) return true;
  }
  return false;
}

void CheckBans(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  for (size_t i = 0; i < file.code.size(); ++i) {
    for (const Ban& ban : Bans()) {
      if (Contains(ban.exempt_folders, TopFolder(file.path)) || !IsBanned(file.code[i], ban))
        continue;
      Add(file, static_cast<int>(i) + 1, rule,
          std::string(ban.word) + " is not used here: " + std::string(ban.instead), out);
    }
  }
}

// A raw pointer never owns: `new` stands only where a unique_ptr takes it at once, or makes what
// lives as long as the process (`static ... = *new`).
void CheckOwnership(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  for (size_t i = 0; i < file.code.size(); ++i) {
    const std::string& line = file.code[i];
    const std::string& before = i > 0 ? file.code[i - 1] : std::string();
    const auto has = [&](std::string_view word) {
      return line.find(word) != std::string::npos || before.find(word) != std::string::npos;
    };
    const bool owned = has("unique_ptr") || has("WrapUnique") || has("static ") || has("reset(");
    if (FindWord(line, "new") != std::string::npos && !owned &&
        line.find('#') == std::string::npos && line.find("operator new") == std::string::npos) {
      Add(file, static_cast<int>(i) + 1, rule, "new without a unique_ptr around it", out);
    }
    const size_t deletion = FindWord(line, "delete");
    const bool defaulted = line.find("= delete") != std::string::npos ||
                           line.find("operator delete") != std::string::npos;
    if (deletion != std::string::npos && !defaulted) {
      Add(file, static_cast<int>(i) + 1, rule, "delete by hand", out);
    }
  }
}

// Spelled in two parts, here and below, so that this file does not hold what it looks for.
void CheckLeftovers(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  static const std::vector<std::string> words = {
      std::string("TO") + "DO", std::string("FIX") + "ME", std::string("XX") + "X"};
  for (size_t i = 0; i < file.lines.size(); ++i) {
    for (const std::string& word : words) {
      if (FindWord(file.lines[i], word) == std::string::npos) continue;
      Add(file, static_cast<int>(i) + 1, rule, word + ": an issue, not a comment", out);
    }
  }
}

// A path of a developer's machine, or the host of a package registry.
void CheckPlaces(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  static const std::vector<std::string> places = {std::string("/wo") + "rk/",
                                                  std::string("/ro") + "ot/",
                                                  std::string("/ho") + "me/",
                                                  std::string("pypi") + ".org",
                                                  std::string("pythonhosted") + ".org",
                                                  std::string("deb.debian") + ".org",
                                                  std::string("archive.ubuntu") + ".com",
                                                  std::string("registry.npm") + "js.org",
                                                  std::string("crates") + ".io",
                                                  std::string("proxy.gol") + "ang.org"};
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const std::string& line = file.lines[i];
    for (const std::string& place : places) {
      for (size_t at = line.find(place); at != std::string::npos; at = line.find(place, at + 1)) {
        const char before = at > 0 ? line[at - 1] : ' ';
        // build/work/ and $root/work/ are not absolute.
        const bool relative = std::isalnum(static_cast<unsigned char>(before)) || before == '_' ||
                              before == '-' || before == '.' || before == '}' || before == '*';
        if (place.front() == '/' && relative) continue;
        Add(file, static_cast<int>(i) + 1, rule,
            place + " exists on no other machine, or is its owner's choice", out);
      }
    }
  }
}

bool HasLengthLimit(std::string_view path) {
  return IsCpp(path) || HasSuffix(path, ".proto") || HasSuffix(path, ".sh") ||
         HasSuffix(path, ".py") || HasSuffix(path, ".cmake") || BaseName(path) == "CMakeLists.txt";
}

int Columns(std::string_view line) {
  return static_cast<int>(
      std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

void CheckLineLength(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  if (!HasLengthLimit(file.path)) return;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const int columns = Columns(file.lines[i]);
    // A link and an include cannot be broken.
    if (columns <= kColumnsMax || file.lines[i].find("://") != std::string::npos ||
        HasPrefix(file.lines[i], "#include")) {
      continue;
    }
    Add(file, static_cast<int>(i) + 1, rule,
        std::to_string(columns) + " columns, at most " + std::to_string(kColumnsMax), out);
  }
}

void CheckFileLength(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  const int lines = static_cast<int>(file.lines.size());
  if (!HasLengthLimit(file.path) || lines <= kFileLinesMax) return;
  Add(file, 1, rule, std::to_string(lines) + " lines, at most " + std::to_string(kFileLinesMax),
      out);
}

void CheckFunctionLength(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  for (const Function& function : Functions(file)) {
    if (function.lines_count() <= kFunctionLinesMax) continue;
    Add(file, function.first_line, rule,
        std::to_string(function.lines_count()) + " lines, at most " +
            std::to_string(kFunctionLinesMax),
        out);
  }
}

std::string GuardOf(std::string_view path) {
  std::string guard = "OKV_";
  for (char c : path) {
    guard += std::isalnum(static_cast<unsigned char>(c))
                 ? static_cast<char>(std::toupper(static_cast<unsigned char>(c)))
                 : '_';
  }
  return guard + "_";
}

void CheckIncludeGuard(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  // Highway includes an -inl.h once for each instruction set: its guard is a toggle.
  if (!IsHeader(file.path) || HasSuffix(file.path, "-inl.h")) return;
  const std::string guard = GuardOf(file.path);
  Names code;
  for (const std::string& line : file.code) {
    if (line.find_first_not_of(' ') != std::string::npos) code.push_back(line);
  }
  const bool opens =
      code.size() >= 3 && code[0] == "#ifndef " + guard && code[1] == "#define " + guard;
  const bool closes = !code.empty() && HasPrefix(code.back(), "#endif") && !file.lines.empty() &&
                      file.lines.back() == "#endif  // " + guard;
  if (!opens || !closes) Add(file, 1, rule, "the include guard is not " + guard, out);
}

const SourceFile* Find(const Files& files, std::string_view path) {
  const auto found =
      std::find_if(files.begin(), files.end(), [&](const SourceFile& f) { return f.path == path; });
  return found == files.end() ? nullptr : &*found;
}

bool IsHeavy(std::string_view name) {
  static const std::set<std::string_view> stl = {
      "algorithm", "array",   "deque",       "fstream",       "functional",   "iostream",
      "list",      "map",     "memory",      "mutex",         "optional",     "set",
      "sstream",   "string",  "string_view", "thread",        "tuple",        "variant",
      "vector",    "utility", "chrono",      "unordered_map", "unordered_set"};
  return HasPrefix(name, "absl/") || HasPrefix(name, "google/protobuf/") ||
         HasSuffix(name, ".pb.h") || HasPrefix(name, "grpc") || stl.count(name) > 0;
}

// The first heavy header that `name` brings along, "" when it brings none.
std::string HeavyBehind(const std::string& name, const Files& files, std::set<std::string>* seen) {
  if (IsHeavy(name)) return name;
  if (!seen->insert(name).second) return "";
  const SourceFile* file = Find(files, name);
  if (file == nullptr) return "";
  for (const Include& include : Includes(*file)) {
    const std::string heavy = HeavyBehind(include.name, files, seen);
    if (!heavy.empty()) return heavy;
  }
  return "";
}

// Abseil alone costs nvcc 5 s a file; so do the headers of ours that include it.
void CheckCudaIncludes(const SourceFile& file, const Files& files, const Rule& rule,
                       Violations* out) {
  if (!IsCuda(file.path) || InTests(file)) return;
  for (const Include& include : Includes(file)) {
    std::set<std::string> seen;
    const std::string heavy = HeavyBehind(include.name, files, &seen);
    if (heavy.empty()) continue;
    Add(file, include.line, rule, include.name + " brings " + heavy + " to nvcc", out);
  }
}

void CheckWhitespace(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const std::string& line = file.lines[i];
    const int number = static_cast<int>(i) + 1;
    if (line.find('\t') != std::string::npos) Add(file, number, rule, "a tab", out);
    if (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) {
      Add(file, number, rule, "white space at the end", out);
    }
  }
  if (file.text.empty()) return;
  const int last = static_cast<int>(file.lines.size());
  if (file.text.back() != '\n') Add(file, last, rule, "no newline at the end of the file", out);
  if (HasSuffix(file.text, "\n\n"))
    Add(file, last, rule, "an empty line at the end of the file", out);
}

// A source file that no CMakeLists.txt names is never compiled, and a test in it never run.
void CheckIsBuilt(const SourceFile& file, const Files& files, const Rule& rule, Violations* out) {
  if (!HasSuffix(file.path, ".cc") && !HasSuffix(file.path, ".cu")) return;
  for (const SourceFile& other : files) {
    if (BaseName(other.path) != "CMakeLists.txt") continue;
    const std::string_view folder =
        std::string_view(other.path)
            .substr(0, other.path.size() - std::string_view("CMakeLists.txt").size());
    if (!HasPrefix(file.path, folder)) continue;
    const std::string name = file.path.substr(folder.size());
    for (const std::string& line : other.lines) {
      for (size_t at = line.find(name); at != std::string::npos; at = line.find(name, at + 1)) {
        const char before = at > 0 ? line[at - 1] : ' ';
        if (before == ' ' || before == '(' || before == '/') return;
      }
    }
  }
  Add(file, 1, rule, "no CMakeLists.txt names it", out);
}

void CheckScript(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  const bool is_script = !file.lines.empty() && HasPrefix(file.lines[0], "#!");
  if (!is_script) {
    if (HasSuffix(file.path, ".sh")) Add(file, 1, rule, "a script starts with #!", out);
    return;
  }
  if (!file.executable) Add(file, 1, rule, "a script is executable", out);
  if (file.lines[0].find("bash") == std::string::npos) return;
  const bool strict =
      std::any_of(file.lines.begin(), file.lines.end(),
                  [](const std::string& line) { return HasPrefix(line, "set -euo pipefail"); });
  if (!strict) Add(file, 1, rule, "a bash script says `set -euo pipefail`", out);
}

bool IsInTree(const Files& files, std::string_view path) {
  return std::any_of(files.begin(), files.end(), [&](const SourceFile& file) {
    if (!HasPrefix(file.path, path)) return false;
    // A folder, a file, or the stem of a file pair.
    return file.path.size() == path.size() || path.back() == '/' || file.path[path.size()] == '/' ||
           file.path[path.size()] == '.';
  });
}

// What a document names between backquotes as a path of the tree is there.
void CheckDocumentPaths(const SourceFile& file, const Files& files, const Rule& rule,
                        Violations* out) {
  if (!HasSuffix(file.path, ".md")) return;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const std::string& line = file.lines[i];
    size_t open = line.find('`');
    while (open != std::string::npos) {
      const size_t close = line.find('`', open + 1);
      if (close == std::string::npos) break;
      const std::string quoted = line.substr(open + 1, close - open - 1);
      const std::string path = quoted.substr(0, quoted.find_first_of(" :*"));
      const std::string_view folder = TopFolder(path);
      const bool is_ours = AllowedIncludes().count(folder) > 0 || folder == "deploy";
      if (is_ours && !IsInTree(files, path)) {
        Add(file, static_cast<int>(i) + 1, rule, path + " is not in the tree", out);
      }
      open = line.find('`', close + 1);
    }
  }
}

std::string AllowMark(std::string_view rule) { return "tidy:allow(" + std::string(rule) + ")"; }

// A mark with a reason of some length, on this line or the one before it.
bool IsAllowed(const SourceFile& file, const Violation& violation) {
  const std::string mark = AllowMark(violation.rule) + ": ";
  for (int line = violation.line - 1; line <= violation.line; ++line) {
    if (line < 1 || line > static_cast<int>(file.lines.size())) continue;
    const std::string& text = file.lines[line - 1];
    const size_t at = text.find(mark);
    if (at != std::string::npos && text.size() - at - mark.size() >= 10) return true;
  }
  return false;
}

void CheckAllowMarks(const SourceFile& file, const Files&, const Rule& rule, Violations* out) {
  if (HasPrefix(file.path, "tests/tidy/")) return;  // Its comments and samples spell the mark.
  for (size_t i = 0; i < file.lines.size(); ++i) {
    if (file.lines[i].find("tidy:allow") == std::string::npos) continue;
    const bool known = std::any_of(AllRules().begin(), AllRules().end(), [&](const Rule& r) {
      const Violation sample = {
          .path = file.path, .line = static_cast<int>(i) + 1, .rule = r.name, .text = ""};
      return file.lines[i].find(AllowMark(r.name)) != std::string::npos && IsAllowed(file, sample);
    });
    if (!known) Add(file, static_cast<int>(i) + 1, rule, "names no rule, or gives no reason", out);
  }
}

}  // namespace

std::string Violation::ToString() const {
  return path + ":" + std::to_string(line) + ": " + rule + ": " + text;
}

const std::vector<Rule>& AllRules() {
  static const std::vector<Rule> rules = {
      {"include-direction", CheckIncludeDirection},
      {"library-home", CheckLibraryHome},
      {"ban", CheckBans},
      {"ownership", CheckOwnership},
      {"leftover", CheckLeftovers},
      {"place", CheckPlaces},
      {"line-length", CheckLineLength},
      {"file-length", CheckFileLength},
      {"function-length", CheckFunctionLength},
      {"include-guard", CheckIncludeGuard},
      {"cuda-include", CheckCudaIncludes},
      {"whitespace", CheckWhitespace},
      {"built", CheckIsBuilt},
      {"script", CheckScript},
      {"document-path", CheckDocumentPaths},
      {"allow", CheckAllowMarks},
  };
  return rules;
}

Violations CheckAll(const Files& files) {
  Violations kept;
  for (const SourceFile& file : files) {
    Violations found;
    for (const Rule& rule : AllRules()) rule.check(file, files, rule, &found);
    std::copy_if(found.begin(), found.end(), std::back_inserter(kept),
                 [&](const Violation& violation) { return !IsAllowed(file, violation); });
  }
  std::stable_sort(kept.begin(), kept.end(), [](const Violation& a, const Violation& b) {
    return std::tie(a.path, a.line) < std::tie(b.path, b.line);
  });
  return kept;
}

}  // namespace okv::tidy

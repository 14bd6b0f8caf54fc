#ifndef OKV_TESTS_TIDY_RULES_H_
#define OKV_TESTS_TIDY_RULES_H_

#include <string>
#include <vector>

#include "tests/tidy/source_file.h"

namespace okv::tidy {

// A line `// tidy:allow(rule): reason` allows that rule on its own line and the next one; without a
// reason it is a violation itself.
struct Violation {
  std::string path;
  int line = 0;
  std::string rule;
  std::string text;

  // "proto/ids.h:12: line-length: 104 columns, at most 100".
  std::string ToString() const;
};

using Files = std::vector<SourceFile>;
using Violations = std::vector<Violation>;

// A rule looks at one file; `files` is the whole tree, for those that must see more.
struct Rule {
  const char* name;
  void (*check)(const SourceFile& file, const Files& files, const Rule& rule, Violations* out);
};

// Every rule, each with a name of its own.
const std::vector<Rule>& AllRules();

// What the rules find in `files`, in order of files and lines, without what a tidy:allow allows.
Violations CheckAll(const Files& files);

}  // namespace okv::tidy

#endif  // OKV_TESTS_TIDY_RULES_H_

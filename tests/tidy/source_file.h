#ifndef OKV_TESTS_TIDY_SOURCE_FILE_H_
#define OKV_TESTS_TIDY_SOURCE_FILE_H_

#include <string>
#include <string_view>
#include <vector>

namespace okv::tidy {

// One file of the tree, as the rules read it. Line n is at index n - 1.
// Thread-compatible.
struct SourceFile {
  std::string path;                // Relative to the root: "proto/ids.h".
  std::string text;                // As it is on the disk.
  std::vector<std::string> lines;  // `text` cut at newlines.
  // `lines` with every comment and the inside of every literal replaced by blanks: what a rule
  // about code looks at. C++ files only; empty for others.
  std::vector<std::string> code;
  bool executable = false;
};

// A function definition of a C++ file, with the lines of its signature and of its closing brace.
struct Function {
  std::string signature;
  int first_line = 0;
  int last_line = 0;

  int lines_count() const { return last_line - first_line + 1; }
};

// An #include: `name` is what stands between the quotes or angle brackets.
struct Include {
  std::string name;
  bool quoted = false;
  int line = 0;
};

SourceFile MakeSourceFile(std::string path, std::string text);

// The folder a path starts with, "" for a file of the root.
std::string_view TopFolder(std::string_view path);
std::string_view BaseName(std::string_view path);
bool HasSuffix(std::string_view text, std::string_view suffix);
bool HasPrefix(std::string_view text, std::string_view prefix);
bool IsHeader(std::string_view path);
bool IsCpp(std::string_view path);   // .h, .cc, .cu, .cuh
bool IsCuda(std::string_view path);  // .cu, .cuh

std::vector<Include> Includes(const SourceFile& file);

// A function is a block in braces, directly in a namespace, a class or the file, whose head has a
// parameter list: `int F(int a) const {`, `A::A() : b_{1} {`, `TEST(A, B) {`. A lambda is part of
// the function around it; what stands right of a `=` is a value.
std::vector<Function> Functions(const SourceFile& file);

// Where `word` stands in `line` as a whole identifier, from `from` on; npos when nowhere.
size_t FindWord(std::string_view line, std::string_view word, size_t from = 0);

}  // namespace okv::tidy

#endif  // OKV_TESTS_TIDY_SOURCE_FILE_H_

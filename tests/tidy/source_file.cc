#include "tests/tidy/source_file.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace okv::tidy {
namespace {

bool IsWordChar(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Where the raw string whose R stands at `at` ends: one past its closing quote.
size_t RawStringEnd(std::string_view text, size_t at) {
  const size_t open = text.find('(', at);
  if (open == std::string_view::npos) return text.size();
  const std::string close = ")" + std::string(text.substr(at + 2, open - at - 2)) + "\"";
  const size_t end = text.find(close, open);
  return end == std::string_view::npos ? text.size() : end + close.size();
}

// Where the literal that opens at `at` with a quote ends: one past its closing quote.
size_t QuotedEnd(std::string_view text, size_t at) {
  const char quote = text[at];
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == quote || text[i] == '\n') {
      return i + 1;
    }
  }
  return text.size();
}

// Blanks text[begin, end), newlines excepted, so that lines and columns stay.
void Blank(std::string* text, size_t begin, size_t end) {
  for (size_t i = begin; i < std::min(end, text->size()); ++i) {
    if ((*text)[i] != '\n') (*text)[i] = ' ';
  }
}

bool StartsRawString(std::string_view text, size_t i) {
  return text[i] == 'R' && i + 1 < text.size() && text[i + 1] == '"' &&
         (i == 0 || !IsWordChar(text[i - 1]));
}

// An include's name stands between quotes but is no literal.
bool InIncludeLine(std::string_view text, size_t i) {
  size_t begin = text.rfind('\n', i);
  begin = begin == std::string_view::npos ? 0 : begin + 1;
  const size_t hash = text.find_first_not_of(" \t", begin);
  return hash < i && text[hash] == '#' &&
         text.substr(hash, i - hash).find("include") != std::string_view::npos;
}

std::string BlankCommentsAndLiterals(std::string_view source) {
  std::string text(source);
  size_t i = 0;
  while (i < source.size()) {
    if (source.substr(i, 2) == "//") {
      const size_t end = std::min(source.find('\n', i), source.size());
      Blank(&text, i, end);
      i = end;
    } else if (source.substr(i, 2) == "/*") {
      const size_t close = source.find("*/", i + 2);
      const size_t end = close == std::string_view::npos ? source.size() : close + 2;
      Blank(&text, i, end);
      i = end;
    } else if (StartsRawString(source, i)) {
      const size_t end = RawStringEnd(source, i);
      Blank(&text, i + 2, end - 1);
      i = end;
    } else if (source[i] == '"' && InIncludeLine(source, i)) {
      i = QuotedEnd(source, i);
    } else if (source[i] == '"' || (source[i] == '\'' && (i == 0 || !IsWordChar(source[i - 1])))) {
      // A quote after a digit separates digits: 1'000'000.
      const size_t end = QuotedEnd(source, i);
      Blank(&text, i + 1, end - 1);
      i = end;
    } else {
      ++i;
    }
  }
  return text;
}

std::vector<std::string> CutLines(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// What a pair of braces holds, told from its head: what stands before it since the last `;`, `{` or
// `}`.
enum class Block { kNamespace, kType, kFunction, kOther };

std::string_view Trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.remove_suffix(1);
  return text;
}

// Drops a leading `template <...>`, whose `class` says nothing about the block.
std::string_view DropTemplate(std::string_view head) {
  while (HasPrefix(head, "template")) {
    size_t i = head.find('<');
    if (i == std::string_view::npos) return head;
    int depth = 0;
    for (; i < head.size(); ++i) {
      if (head[i] == '<') ++depth;
      if (head[i] == '>' && --depth == 0) break;
    }
    head = Trim(head.substr(std::min(i + 1, head.size())));
  }
  return head;
}

// What is outside of all parentheses of a head.
struct Head {
  bool has_parameters = false;   // A `)`.
  bool has_assignment = false;   // A lone `=`.
  bool in_initializers = false;  // A lone `:` after the parameters.
};

// Where the parameter list of `operator=` or `operator()` opens; `from` is the end of "operator".
size_t OperatorParameters(std::string_view head, size_t from) {
  if (Trim(head.substr(from)).substr(0, 2) == "()") from = head.find(')', from) + 1;
  return std::min(head.find('(', from), head.size());
}

Head ReadHead(std::string_view head) {
  Head result;
  int depth = 0;
  for (size_t i = 0; i < head.size(); ++i) {
    if (depth == 0 && FindWord(head, "operator", i) == i) i = OperatorParameters(head, i + 8);
    if (i >= head.size()) break;
    const char c = head[i];
    if (c == '(') ++depth;
    if (c == ')') {
      --depth;
      result.has_parameters = true;
    }
    if (depth > 0) continue;
    if (c == '=' && !result.has_parameters) result.has_assignment = true;
    if (c == ':' && i + 1 < head.size() && head[i + 1] == ':') {
      ++i;
    } else if (c == ':' && result.has_parameters) {
      result.in_initializers = true;
    }
  }
  return result;
}

Block Classify(std::string_view head) {
  head = DropTemplate(Trim(head));
  if (FindWord(head, "namespace") != std::string_view::npos || HasPrefix(head, "extern \"")) {
    return Block::kNamespace;
  }
  for (std::string_view keyword : {"class", "struct", "union", "enum"}) {
    if (FindWord(head, keyword) == 0) return Block::kType;
    if (HasPrefix(head, "typedef ") && FindWord(head, keyword) == 8) return Block::kType;
  }
  const Head parts = ReadHead(head);
  return parts.has_parameters && !parts.has_assignment ? Block::kFunction : Block::kOther;
}

// `A::A() : b_` before a `{`: the braces are b_'s value, the body is still to come.
bool IsMemberInitializer(std::string_view head) {
  head = Trim(head);
  return !head.empty() && (IsWordChar(head.back()) || head.back() == '>') &&
         ReadHead(head).in_initializers;
}

// `F(Options o = ` before a `{`.
bool InParentheses(std::string_view head) {
  return std::count(head.begin(), head.end(), '(') > std::count(head.begin(), head.end(), ')');
}

// The code as one text without preprocessor lines (a macro's braces need not match).
std::string JoinWithoutDirectives(const std::vector<std::string>& code) {
  std::string text;
  bool in_directive = false;
  for (const std::string& line : code) {
    const size_t first = line.find_first_not_of(" \t");
    const bool starts = first != std::string::npos && line[first] == '#';
    in_directive = in_directive || starts;
    text += in_directive ? std::string(line.size(), ' ') : line;
    text += '\n';
    if (line.empty() || line.back() != '\\') in_directive = false;
  }
  return text;
}

// One past the `}` that closes the `{` at `at`.
size_t BlockEnd(std::string_view text, size_t at) {
  int depth = 0;
  for (size_t i = at; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  return text.size();
}

int LineOf(std::string_view text, size_t at) {
  return 1 +
         static_cast<int>(std::count(text.begin(), text.begin() + std::min(at, text.size()), '\n'));
}

// `public:` and the like end what came before them.
bool EndsAccessSpecifier(std::string_view head) {
  head = Trim(head);
  return head == "public" || head == "private" || head == "protected";
}

}  // namespace

SourceFile MakeSourceFile(std::string path, std::string text) {
  SourceFile file;
  file.path = std::move(path);
  file.text = std::move(text);
  file.lines = CutLines(file.text);
  if (IsCpp(file.path)) file.code = CutLines(BlankCommentsAndLiterals(file.text));
  return file;
}

std::string_view TopFolder(std::string_view path) {
  const size_t slash = path.find('/');
  return slash == std::string_view::npos ? std::string_view() : path.substr(0, slash);
}

std::string_view BaseName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

bool HasSuffix(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

bool HasPrefix(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool IsHeader(std::string_view path) { return HasSuffix(path, ".h") || HasSuffix(path, ".cuh"); }
bool IsCuda(std::string_view path) { return HasSuffix(path, ".cu") || HasSuffix(path, ".cuh"); }
bool IsCpp(std::string_view path) {
  return IsHeader(path) || IsCuda(path) || HasSuffix(path, ".cc");
}

std::vector<Include> Includes(const SourceFile& file) {
  std::vector<Include> includes;
  for (size_t i = 0; i < file.code.size(); ++i) {
    const std::string_view line = Trim(file.code[i]);
    if (line.empty() || line[0] != '#' || line.find("include") == std::string_view::npos) continue;
    const size_t open = line.find_first_of("\"<");
    if (open == std::string_view::npos) continue;
    const bool quoted = line[open] == '"';
    const size_t close = line.find(quoted ? '"' : '>', open + 1);
    if (close == std::string_view::npos) continue;
    includes.push_back({.name = std::string(line.substr(open + 1, close - open - 1)),
                        .quoted = quoted,
                        .line = static_cast<int>(i) + 1});
  }
  return includes;
}

std::vector<Function> Functions(const SourceFile& file) {
  const std::string text = JoinWithoutDirectives(file.code);
  std::vector<Function> functions;
  size_t head_begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view head = std::string_view(text).substr(head_begin, i - head_begin);
    const bool specifier = text[i] == ':' && EndsAccessSpecifier(head);
    if (text[i] == ';' || text[i] == '}' || specifier) {
      // A `;` inside parentheses cannot stand outside of functions.
      head_begin = i + 1;
    } else if (text[i] == '{' && (InParentheses(head) || IsMemberInitializer(head))) {
      i = BlockEnd(text, i) - 1;  // A value; the head goes on.
    } else if (text[i] == '{') {
      const Block block = Classify(head);
      if (block == Block::kFunction) {
        const size_t signature_at = head_begin + head.find_first_not_of(" \t\n");
        const size_t end = BlockEnd(text, i);
        functions.push_back({.signature = std::string(Trim(head)),
                             .first_line = LineOf(text, signature_at),
                             .last_line = LineOf(text, end - 1)});
      }
      // Namespaces and types are entered, everything else is passed over.
      if (block == Block::kFunction || block == Block::kOther) i = BlockEnd(text, i) - 1;
      head_begin = i + 1;
    }
  }
  return functions;
}

size_t FindWord(std::string_view line, std::string_view word, size_t from) {
  for (size_t at = line.find(word, from); at != std::string_view::npos;
       at = line.find(word, at + 1)) {
    const size_t end = at + word.size();
    const bool starts = at == 0 || !IsWordChar(line[at - 1]) || !IsWordChar(word.front());
    const bool ends = end >= line.size() || !IsWordChar(line[end]) || !IsWordChar(word.back());
    if (starts && ends) return at;
  }
  return std::string_view::npos;
}

}  // namespace okv::tidy

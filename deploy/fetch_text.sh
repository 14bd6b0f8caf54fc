#!/usr/bin/env bash
# Puts sample English prose at build/text/jargon.txt: the Jargon File (public domain) from Debian's
# package jargon-text, unwrapped to one line a paragraph, without tables, contents and markup, in
# plain quotes: ordinary text, as a language model knows it. Idempotent and deterministic.
#
#   deploy/fetch_text.sh [--help]
#
# Takes the installed package's file; where that is missing (slim images leave documentation out)
# the package is downloaded and unpacked beside the system. Exits 1 and names the package when it
# cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

package=jargon-text
member=usr/share/doc/jargon-text/jargon.txt.gz
target=build/text/jargon.txt

say() { printf 'fetch_text: %s\n' "$*"; }
die() { printf 'fetch_text: error: %s\n' "$*" >&2; exit 1; }

case "${1:-}" in
  '') ;;
  --help) sed -n '2,10p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
  *) echo "fetch_text: unknown flag '$1' (see --help)" >&2; exit 2 ;;
esac

if [ -s "$target" ]; then
  say "the text is in place: $target"
  exit 0
fi

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
source=/$member
if [ ! -e "$source" ]; then
  say "downloading package $package"
  # As this user: apt's own may not write into the directory.
  download() {
    (cd "$temp" && apt-get -qq -o "APT::Sandbox::User=$(id -un)" download "$package" >&2)
  }
  if ! download; then  # Perhaps the package lists are old, or not there.
    apt-get update -qq >&2 || true
    download || die "package $package cannot be downloaded"
  fi
  dpkg-deb -x "$temp"/${package}_*.deb "$temp/root" || die "package $package cannot be unpacked"
  source=$temp/root/$member
  [ -e "$source" ] || die "package $package holds no $member"
fi

mkdir -p "$(dirname "$target")"
partial=$(mktemp "$target.XXXXXX")
trap 'rm -rf "$temp" "$partial"' EXIT
gzip -dc "$source" | python3 -c '
import re
import sys

text = sys.stdin.buffer.read().decode("utf-8")
plain = {"\u00a0": " ", "\u2018": chr(39), "\u2019": chr(39), "\u00b4": chr(39), "\u201c": chr(34),
         "\u201d": chr(34), "\u2014": "-", "\u2212": "-", "\u2022": "-"}
text = text.translate({ord(char): to for char, to in plain.items()})
paragraphs = []
for block in re.split(r"\n\s*\n", text):
    if re.search(r"[\u2500-\u257f]", block):
        continue                                          # Tables and rules.
    lines = [line.rstrip() for line in block.split("\n") if line.strip()]
    if not lines:
        continue
    if len(lines) == 1 and not re.search(r"[.!?:;)][\")" + chr(39) + "]?$", lines[0]):
        continue                                          # Headings, entries of a contents list.
    if all(re.match(r" {3}(?! )", line) for line in lines):
        lines = [" ".join(line.strip() for line in lines)]
    else:
        lines = [line.strip() for line in lines]          # Verse and examples keep their lines.
    paragraph = "\n".join(lines)
    paragraph = re.sub(r"\{([^{}]*)\}", r"\1", paragraph)  # Cross-references.
    # The entry ":VMS: /V.M.S/, n." becomes "VMS: n."
    paragraph = re.sub(r"^:([^:]+): */[^ ]*/,? *", r"\1: ", paragraph)
    paragraph = re.sub(r"^:([^:]+): *", r"\1: ", paragraph)
    paragraph = re.sub(r"[ \t]+", " ", paragraph).strip()
    letters = sum(char.isalpha() or char == " " for char in paragraph)
    if paragraph and letters >= 0.8 * len(paragraph):     # Not screen dumps and drawings.
        paragraphs.append(paragraph)
sys.stdout.buffer.write(("\n\n".join(paragraphs) + "\n").encode("utf-8"))
' >"$partial" || die "the text of package $package cannot be read"
bytes=$(wc -c <"$partial")
[ "$bytes" -ge 1000000 ] || die "the text of package $package is only $bytes bytes long"
chmod 644 "$partial"
mv "$partial" "$target"
say "the text is in place: $target ($bytes bytes)"

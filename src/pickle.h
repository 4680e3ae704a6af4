// Python's pickle as data: the opcodes of protocols 2 to 5 that weights need, run into a flat list
// of nodes. Nothing is ever called: a REDUCE becomes a kCall node, and only for a global that the
// caller allows.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "mapped_file.h"

namespace gptfast::pickle {

enum class Kind : uint8_t {
  kNone,
  kBool,        // integer
  kInt,         // integer
  kBigInt,      // text: little-endian two's complement
  kFloat,       // number
  kString,      // text: UTF-8 as it stands in the file
  kBytes,       // text
  kTuple,       // items
  kList,        // items
  kSet,         // items
  kDict,        // items: key, value, key, value, ...
  kGlobal,      // text: "module.name"
  kCall,        // items: the global, its argument tuple
  kPersistent,  // items: the id
};

using Ref = uint32_t;  // index of a node

struct Node {
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string_view text{};
  std::vector<Ref> items{};
};

/// One unpickled object. Nodes refer to each other by index, so that cycles and deep nesting cost
/// nothing to hold or destroy. Strings point into the pickle's bytes, which must outlive the
/// program.
struct Program {
  std::vector<Node> nodes;
  std::deque<std::string> globals;
  Ref root = 0;
  size_t size = 0;  ///< bytes of the pickle, STOP included

  const Node& operator[](Ref ref) const { return nodes[ref]; }
};

/// Runs the pickle at the front of `bytes`. Throws one line for a truncated or malformed pickle, an
/// opcode outside the set, or a global for which `allowed` is false; it names the global.
Program parse(Bytes bytes, bool (*allowed)(std::string_view global));

}  // namespace gptfast::pickle

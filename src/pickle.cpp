#include "pickle.h"

#include <c10/util/Exception.h>

#include <bit>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace gptfast::pickle {
namespace {

// A checkpoint of 100,000 tensors takes about 3 million steps. The limit bounds what a hostile file
// can ask for: a step makes at most one node of 64 bytes.
constexpr size_t kMaxSteps = size_t{4} << 20;
constexpr int kMaxProtocol = 5;

class Machine {
 public:
  Machine(Bytes bytes, bool (*allowed)(std::string_view)) : bytes_(bytes), allowed_(allowed) {}

  Program run() {
    for (;;) {
      spend(1);
      const uint8_t opcode = byte();
      if (opcode == '.') {
        program_.root = pop();
        program_.size = at_;
        return std::move(program_);
      }
      if (!constant(opcode) && !container(opcode) && !stack_or_memo(opcode) && !object(opcode)) {
        TORCH_CHECK(false, "its pickle holds the opcode ", static_cast<int>(opcode), " at byte ",
                    at_ - 1,
                    ", which a checkpoint of torch.save never has; the file is damaged or of "
                    "another kind");
      }
    }
  }

 private:
  void spend(size_t steps) {
    TORCH_CHECK(steps <= kMaxSteps - steps_, "its pickle takes more than ", kMaxSteps,
                " steps; no checkpoint needs that");
    steps_ += steps;
  }

  // ---- input
  Bytes take(uint64_t size) {
    TORCH_CHECK(size <= bytes_.size() - at_, "its pickle is truncated: ", size,
                " bytes expected at byte ", at_, ", ", bytes_.size() - at_, " are left");
    const Bytes taken = bytes_.subspan(at_, size);
    at_ += size;
    return taken;
  }
  template <class T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  uint8_t byte() { return read<uint8_t>(); }
  std::string_view text(uint64_t size) {
    const Bytes taken = take(size);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::string_view line() {
    const Bytes rest = bytes_.subspan(at_);
    const void* end = rest.empty() ? nullptr : std::memchr(rest.data(), '\n', rest.size());
    TORCH_CHECK(end != nullptr, "its pickle is truncated inside a name at byte ", at_);
    const std::string_view found = text(static_cast<const uint8_t*>(end) - rest.data());
    ++at_;
    return found;
  }

  // ---- stack
  Ref add(Node node) {
    program_.nodes.push_back(std::move(node));
    return static_cast<Ref>(program_.nodes.size() - 1);
  }
  void push(Ref ref) { stack_.push_back(ref); }
  bool push(Node node) {
    push(add(std::move(node)));
    return true;
  }
  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  Ref pop() {
    const Ref ref = top();
    stack_.pop_back();
    return ref;
  }
  Ref top() const {
    TORCH_CHECK(stack_.size() > bottom(), "its pickle takes from an empty stack at byte ", at_ - 1);
    return stack_.back();
  }
  std::vector<Ref> pop_mark() {
    TORCH_CHECK(!marks_.empty(), "its pickle misses a mark at byte ", at_ - 1);
    std::vector<Ref> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  bool push_tuple(size_t size) {
    Node node{.kind = Kind::kTuple, .items = std::vector<Ref>(size)};
    for (size_t i = size; i-- > 0;) node.items[i] = pop();
    return push(std::move(node));
  }
  bool push_pairs(std::vector<Ref> items) {
    TORCH_CHECK(items.size() % 2 == 0, "its pickle has a key without a value at byte ", at_ - 1);
    return push({.kind = Kind::kDict, .items = std::move(items)});
  }
  bool extend(Kind kind, const std::vector<Ref>& items) {
    Node& target = program_.nodes[top()];
    TORCH_CHECK(target.kind == kind && (kind != Kind::kDict || items.size() % 2 == 0),
                "its pickle adds items to something that takes none, at byte ", at_ - 1);
    target.items.insert(target.items.end(), items.begin(), items.end());
    return true;
  }

  // ---- opcodes by group; each returns false when the opcode is not of its group
  bool constant(uint8_t opcode) {
    switch (opcode) {
      case 'N':
        return push(Node{});
      case 0x88:
        return push({.kind = Kind::kBool, .integer = 1});
      case 0x89:
        return push({.kind = Kind::kBool});
      case 'J':
        return push_int(read<int32_t>());
      case 'K':
        return push_int(byte());
      case 'M':
        return push_int(read<uint16_t>());
      case 0x8a:
        return push_long(text(byte()));
      case 0x8b:
        return push_long(text(read<uint32_t>()));
      case 'G':
        return push({.kind = Kind::kFloat,
                     .number = std::bit_cast<double>(__builtin_bswap64(read<uint64_t>()))});
      case 'X':
        return push_text(Kind::kString, read<uint32_t>());
      case 0x8c:
        return push_text(Kind::kString, byte());
      case 0x8d:
        return push_text(Kind::kString, read<uint64_t>());
      case 'U':
        return push_text(Kind::kString, byte());  // Python 2's str
      case 'T':
        return push_text(Kind::kString, read<uint32_t>());
      case 'C':
        return push_text(Kind::kBytes, byte());
      case 'B':
        return push_text(Kind::kBytes, read<uint32_t>());
      case 0x8e:
      case 0x96:
        return push_text(Kind::kBytes, read<uint64_t>());
      default:
        return false;
    }
  }
  bool push_int(int64_t value) { return push({.kind = Kind::kInt, .integer = value}); }
  bool push_text(Kind kind, uint64_t size) { return push({.kind = kind, .text = text(size)}); }
  bool push_long(std::string_view digits) {
    if (digits.size() > sizeof(int64_t)) return push({.kind = Kind::kBigInt, .text = digits});
    uint64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    std::memcpy(&value, digits.data(), digits.size());
    return push_int(static_cast<int64_t>(value));
  }

  bool container(uint8_t opcode) {
    switch (opcode) {
      case ')':
        return push_tuple(0);
      case 0x85:
        return push_tuple(1);
      case 0x86:
        return push_tuple(2);
      case 0x87:
        return push_tuple(3);
      case 't':
        return push({.kind = Kind::kTuple, .items = pop_mark()});
      case ']':
        return push({.kind = Kind::kList});
      case 'l':
        return push({.kind = Kind::kList, .items = pop_mark()});
      case 'a':
        return extend(Kind::kList, {pop()});
      case 'e':
        return extend(Kind::kList, pop_mark());
      case 0x8f:
        return push({.kind = Kind::kSet});
      case 0x90:
        return extend(Kind::kSet, pop_mark());
      case 0x91:
        return push({.kind = Kind::kSet, .items = pop_mark()});
      case '}':
        return push_pairs({});
      case 'd':
        return push_pairs(pop_mark());
      case 's': {
        const Ref value = pop();
        const Ref key = pop();
        return extend(Kind::kDict, {key, value});
      }
      case 'u':
        return extend(Kind::kDict, pop_mark());
      default:
        return false;
    }
  }

  bool stack_or_memo(uint8_t opcode) {
    switch (opcode) {
      case 0x80: {
        const int protocol = byte();
        TORCH_CHECK(protocol <= kMaxProtocol, "its pickle has protocol ", protocol,
                    "; the known ones end at ", kMaxProtocol);
        return true;
      }
      case 0x95:
        take(sizeof(uint64_t));
        return true;  // FRAME: a hint for buffering
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        pop();
        return true;
      case '1':
        pop_mark();
        return true;
      case '2':
        push(top());
        return true;
      case 'q':
        memo_[byte()] = top();
        return true;
      case 'r':
        memo_[read<uint32_t>()] = top();
        return true;
      case 0x94: {
        const auto index = static_cast<uint32_t>(memo_.size());
        memo_[index] = top();
        return true;
      }
      case 'h':
        return recall(byte());
      case 'j':
        return recall(read<uint32_t>());
      default:
        return false;
    }
  }
  bool recall(uint32_t index) {
    const auto found = memo_.find(index);
    TORCH_CHECK(found != memo_.end(), "its pickle recalls object ", index,
                ", which it never stored");
    push(found->second);
    return true;
  }

  bool object(uint8_t opcode) {
    switch (opcode) {
      case 'c': {
        const std::string_view module = line();
        return push_global(module, line());
      }
      case 0x93: {
        const Node& name = program_[pop()];
        const Node& module = program_[pop()];
        TORCH_CHECK(name.kind == Kind::kString && module.kind == Kind::kString,
                    "its pickle names a global by no string");
        return push_global(module.text, name.text);
      }
      case 'R':
      case 0x81:
        return call();
      case 'b':
        return build();
      case 'Q': {
        const Ref id = pop();
        return push({.kind = Kind::kPersistent, .items = {id}});
      }
      default:
        return false;
    }
  }
  bool push_global(std::string_view module, std::string_view name) {
    std::string full = std::string(module) + "." + std::string(name);
    TORCH_CHECK(allowed_(full), "refused: its pickle names the global '", full.substr(0, 200),
                "', which weights do not need; nothing of it was run. Save a plain dict of tensors "
                "with torch.save instead");
    program_.globals.push_back(std::move(full));
    return push({.kind = Kind::kGlobal, .text = program_.globals.back()});
  }
  bool call() {
    const Ref arguments = pop();
    const Ref callee = pop();
    TORCH_CHECK(program_[callee].kind == Kind::kGlobal && program_[arguments].kind == Kind::kTuple,
                "its pickle calls something that is no known global, at byte ", at_ - 1);
    if (program_[callee].text == "collections.OrderedDict") return ordered_dict(arguments);
    return push({.kind = Kind::kCall, .items = {callee, arguments}});
  }
  // OrderedDict() or, from Python 2, OrderedDict([[key, value], ...]).
  bool ordered_dict(Ref arguments) {
    std::vector<Ref> items;
    if (!program_[arguments].items.empty()) {
      spend(program_[program_[arguments].items[0]]
                .items.size());  // a copy, which a hostile pickle could ask for again and again
      for (const Ref pair : program_[program_[arguments].items[0]].items) {
        TORCH_CHECK(program_[pair].items.size() == 2,
                    "its pickle makes an OrderedDict from no list of pairs");
        items.insert(items.end(), program_[pair].items.begin(), program_[pair].items.end());
      }
    }
    return push_pairs(std::move(items));
  }
  // Attributes of a dict (a state dict's _metadata) or of a rebuilt object; no weight depends on
  // them.
  bool build() {
    pop();
    const Kind kind = program_[top()].kind;
    TORCH_CHECK(kind == Kind::kDict || kind == Kind::kCall,
                "its pickle sets attributes of something that has none");
    return true;
  }

  Bytes bytes_;
  bool (*allowed_)(std::string_view);
  size_t at_ = 0;
  size_t steps_ = 0;
  Program program_;
  std::vector<Ref> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, Ref> memo_;
};

}  // namespace

Program parse(Bytes bytes, bool (*allowed)(std::string_view global)) {
  return Machine(bytes, allowed).run();
}

}  // namespace gptfast::pickle

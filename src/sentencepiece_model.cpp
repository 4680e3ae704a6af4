#include "sentencepiece_model.h"

#include <cstring>

namespace gptfast {

namespace {

// Protocol buffers' wire format, as far as it is needed.
class Message {
 public:
  void number(uint32_t field, uint64_t value) {
    varint(uint64_t{field} << 3);
    varint(value);
  }
  void real(uint32_t field, float value) {
    varint(uint64_t{field} << 3 | 5);
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    bytes_.append(bytes, sizeof value);
  }
  void text(uint32_t field, std::string_view value) {
    varint(uint64_t{field} << 3 | 2);
    varint(value.size());
    bytes_ += value;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void varint(uint64_t value) {
    while (value >= 0x80) {
      bytes_ += static_cast<char>(value | 0x80);
      value >>= 7;
    }
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// The comments give the fields their names in sentencepiece_model.proto.
// NOLINTBEGIN(bugprone-argument-comment)
std::string trainer_spec(const std::vector<Piece>& pieces, const SentencePieceSettings& settings) {
  constexpr uint64_t kBpe = 2;
  Message spec;
  spec.number(/*model_type=*/3, kBpe);
  spec.number(/*vocab_size=*/4, pieces.size());
  bool byte_fallback = false;
  for (size_t id = 0; id < pieces.size(); ++id) {
    byte_fallback = byte_fallback || pieces[id].type == PieceType::kByte;
    if (pieces[id].type != PieceType::kUnknown) continue;
    spec.number(/*unk_id=*/40, id);
    spec.text(/*unk_piece=*/45, pieces[id].text);
  }
  spec.number(/*byte_fallback=*/35, byte_fallback ? 1 : 0);
  // An absent number is 1 or 2, so "none" has to be written: -1 as a ten-byte varint.
  spec.number(/*bos_id=*/41, static_cast<uint64_t>(settings.bos_id));
  spec.number(/*eos_id=*/42, static_cast<uint64_t>(settings.eos_id));
  spec.number(/*pad_id=*/43, static_cast<uint64_t>(-1));
  if (settings.bos_id >= 0) spec.text(/*bos_piece=*/46, pieces[settings.bos_id].text);
  if (settings.eos_id >= 0) spec.text(/*eos_piece=*/47, pieces[settings.eos_id].text);
  return spec.bytes();
}

}  // namespace

std::string sentencepiece_model(const std::vector<Piece>& pieces,
                                const SentencePieceSettings& settings) {
  Message model;
  for (const Piece& piece : pieces) {
    Message entry;
    entry.text(/*piece=*/1, piece.text);
    entry.real(/*score=*/2, piece.score);
    entry.number(/*type=*/3, static_cast<uint64_t>(piece.type));
    model.text(/*pieces=*/1, entry.bytes());
  }
  model.text(/*trainer_spec=*/2, trainer_spec(pieces, settings));
  Message normalizer;
  normalizer.text(/*name=*/1, "identity");
  normalizer.number(/*add_dummy_prefix=*/3, settings.add_dummy_prefix ? 1 : 0);
  normalizer.number(/*remove_extra_whitespaces=*/4, 0);
  normalizer.number(/*escape_whitespaces=*/5, 1);
  model.text(/*normalizer_spec=*/3, normalizer.bytes());
  return model.bytes();
}

// NOLINTEND(bugprone-argument-comment)
}  // namespace gptfast

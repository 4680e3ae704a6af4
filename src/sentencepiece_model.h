// Writing a SentencePiece model (sentencepiece_model.proto of google/sentencepiece) from a
// vocabulary with scores.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gptfast {

/// Numbers as in ModelProto.SentencePiece.Type; GGUF's token types are the same ones.
enum class PieceType : uint8_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

struct Piece {
  std::string_view text;
  float score = 0;
  PieceType type = PieceType::kNormal;
};

struct SentencePieceSettings {
  int64_t bos_id = -1;  ///< -1: none
  int64_t eos_id = -1;
  bool add_dummy_prefix = true;
};

/// The bytes of a tokenizer.model of type BPE with byte fallback, without normalization, as Llama's
/// and Mistral's.
std::string sentencepiece_model(const std::vector<Piece>& pieces,
                                const SentencePieceSettings& settings);

}  // namespace gptfast

// Counter-based random numbers (Philox-4x32-10; Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC'11), the same on the host and in CUDA kernels: noise is a pure function of (seed,
// position, token), so sampling has no state to keep or to capture.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define GPTFAST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GPTFAST_HOST_DEVICE inline
#endif

namespace gptfast {

struct PhiloxBlock {
  uint32_t word[4];
};

GPTFAST_HOST_DEVICE PhiloxBlock philox(uint32_t c0, uint32_t c1, uint32_t c2, uint64_t key) {
  constexpr uint32_t kMul0 = 0xD2511F53,
                     kMul1 = 0xCD9E8D57;  // multipliers and key increments of the paper
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  uint32_t c3 = 0;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMul0) * c0, p1 = static_cast<uint64_t>(kMul1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Uniform in (0, 1): 23 bits and a half, so that neither end is reached in float.
GPTFAST_HOST_DEVICE float philox_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5F) * 0x1p-23F;
}

/// What a draw is for; draws of different streams are independent.
enum class NoiseStream : uint32_t { kSample = 0, kAccept = 1, kResidual = 2 };

/// Uniform noise of token `i` at position `pos`.
GPTFAST_HOST_DEVICE float uniform_noise(uint64_t seed, uint32_t pos, uint32_t i,
                                        NoiseStream stream) {
  const PhiloxBlock block = philox(i / 4, pos, static_cast<uint32_t>(stream), seed);
  return philox_uniform(block.word[i % 4]);
}

/// -log(e), e ~ Exp(1): argmax(logit + gumbel) draws from softmax(logits), being the logarithm of
/// argmax(p / e).
GPTFAST_HOST_DEVICE float gumbel_noise(uint64_t seed, uint32_t pos, uint32_t i,
                                       NoiseStream stream) {
  return -logf(-logf(uniform_noise(seed, pos, i, stream)));
}
constexpr float kLargestGumbelNoise = 16.7F;  // -log(-log(1 - 2^-24)) is 16.64

}  // namespace gptfast

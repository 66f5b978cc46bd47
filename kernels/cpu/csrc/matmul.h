// x @ weightᵀ + bias for bf16 x, and packed weights in bf16 or int8. Sums are float32; results are float32 or bf16.
//
// Packed weights are panels of 32 outputs: [outputs / 32][inputs / 2][32][2]. A vector has 16 outputs for two
// neighbouring inputs, as dot products of pairs need. A tile is at most 12 rows of x times one panel, with its sums in
// 24 registers; with 12 rows, a broadcast a row starts two dot products a cycle. 192 rows at a time are multiplied by
// all panels, so that they stay in a core's L2 cache.
//
// Processors without bf16 dot products read a pair as a 32-bit number, whose halves become float32 by shifts, in tiles
// of fewer rows. Also batch-invariant. On an EPYC with AVX2, torch's bf16 products took 2 to 7 times as long.
//
// int8 weights have a scale for 32 inputs of an output. Number times scale is rounded to bf16 for any number of rows,
// which keeps products batch-invariant. One or two tiles convert while reading, which dot products of 8 rows or more
// hide; with more tiles, a panel is converted once.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kPanel = 32;
constexpr int64_t kGroup = 32;

// A panel's outputs for 32 neighbouring inputs.
struct Int8Group {
  at::BFloat16 scales[kPanel];
  int8_t weights[kGroup / 2][kPanel][2];
};
static_assert(sizeof(Int8Group) % 64 == 0);

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

constexpr int64_t kChunkRows = 192;

struct Sizes {
  int64_t rows, inputs, outputs, x_stride;
};

// Results [rows, outputs]; only the pointer of their type is set.
struct Results {
  at::BFloat16* rounded;
  float* wide;

  // Prefetches a row's results for a panel, far from recent writes. With 32 rows and 4,864 outputs, up to a tenth
  // faster.
  void fetch(int64_t place) const {
    const char* first = wide != nullptr ? reinterpret_cast<const char*>(wide + place)
                                        : reinterpret_cast<const char*>(rounded + place);
    __builtin_prefetch(first, 1);
    if (wide != nullptr) __builtin_prefetch(first + 64, 1);
  }
  void put(int64_t place, const Vec& sums, int64_t count) const {
    if (wide != nullptr) {
      store(wide + place, sums, count);
    } else {
      store(rounded + place, sums, count);
    }
  }
};

// Calls in a tile are inlined, because a call would spill 24 registers of sums.
#define PAGEWIRE_INLINE __attribute__((always_inline)) inline

// Prefetches the next panel of weights in 8 bits or less. Each of several tiles prefetches a part, a few cache lines
// before each stretch of inputs: all at once, 8 to 12 rows took 1.5 times as long. A single tile waits for memory
// anyway, and bf16 tiles take longer; hardware prefetching suffices for both.
class Ahead {
 public:
  // next: the next panel, of `blocks` blocks. The current tile is `part` of `parts`, with `stretches` stretches.
  template <typename Block>
  Ahead(const Block* next, int64_t blocks, int64_t part, int64_t parts, int64_t stretches) {
    const int64_t bytes = blocks * static_cast<int64_t>(sizeof(Block));
    line_ = end_ = reinterpret_cast<const char*>(next) + bytes * part / parts;
    bytes_a_stretch_ = parts > 1 ? (bytes + parts * stretches - 1) / (parts * stretches) : 0;
  }

  PAGEWIRE_INLINE void fetch() {
    for (end_ += bytes_a_stretch_; line_ < end_; line_ += 64) __builtin_prefetch(line_, 0, 2);
  }

 private:
  const char* line_;
  const char* end_;
  int64_t bytes_a_stretch_;
};

// `Ahead` for a single tile. An `Ahead` that prefetches nothing would take 1.01 to 1.06 times as long for 1 to 4 rows
// by Q4_K.
struct NothingAhead {
  PAGEWIRE_INLINE void fetch() {}
};

#if defined(__AVX512BF16__)

constexpr int64_t kTileRows = 12;
constexpr int64_t kMaxNarrowTiles = 2;  // tiles up to which each converts narrower weights itself

// A panel's weights for two neighbouring inputs at a time: a vector for outputs 0 to 15, and one for 16 to 31. The
// caller calls `enter` with the first input of each stretch.
struct Bf16Panel {
  static constexpr int64_t kStretch = std::numeric_limits<int64_t>::max();

  const at::BFloat16* weights;  // [inputs / 2][32][2]

  PAGEWIRE_INLINE void enter(int64_t) {}
  PAGEWIRE_INLINE void read(int64_t input, __m512bh& low, __m512bh& high) const {
    low = (__m512bh)_mm512_loadu_si512(weights + input * kPanel);
    high = (__m512bh)_mm512_loadu_si512(weights + input * kPanel + kPanel);
  }
};

struct Int8Panel {
  static constexpr int64_t kStretch = kGroup;

  const Int8Group* groups;
  Ahead ahead;
  const int8_t* weights = nullptr;  // of the group, [16][32][2]
  int64_t first = 0;                // first input of the group
  __m512 scales[4] = {};            // each for eight outputs and both inputs of a pair

  PAGEWIRE_INLINE void enter(int64_t input) {
    ahead.fetch();
    const Int8Group& group = groups[input / kGroup];
    weights = group.weights[0][0];
    first = input;
    const __m512i narrow = _mm512_loadu_si512(group.scales);
    // The permutation puts scale i into the upper halves of lanes 2 i and 2 i + 1.
    __m512i places = _mm512_slli_epi32(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), 16);
    for (auto& eight : scales) {
      eight = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, places, narrow));
      places = _mm512_add_epi32(places, _mm512_set1_epi32(8 << 16));
    }
  }
  PAGEWIRE_INLINE void read(int64_t input, __m512bh& low, __m512bh& high) const {
    const auto* source = reinterpret_cast<const __m128i*>(weights + (input - first) * kPanel);
    low = _mm512_cvtne2ps_pbh(scaled(source + 1, scales[1]), scaled(source, scales[0]));
    high = _mm512_cvtne2ps_pbh(scaled(source + 3, scales[3]), scaled(source + 2, scales[2]));
  }
  PAGEWIRE_INLINE static __m512 scaled(const __m128i* weights, __m512 scales) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(weights))), scales);
  }
};

// Stores a pair of inputs for all outputs of a panel, in bf16.
template <typename Panel>
PAGEWIRE_INLINE void widen_pair(const Panel& narrow, int64_t input, at::BFloat16* wide) {
  __m512bh low, high;
  narrow.read(input, low, high);
  _mm512_storeu_si512(wide, (__m512i)low);
  _mm512_storeu_si512(wide + kPanel, (__m512i)high);
}

template <int kRows, typename Panel>
inline void multiply_tile(
    Panel weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out, int64_t row,
    int64_t panel) {
  x += row * sizes.x_stride;
  __m512 sums[kRows][2];
  for (int i = 0; i < kRows; ++i) out.fetch((row + i) * sizes.outputs + panel * kPanel);
  for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t start = 0, end; start < sizes.inputs; start = end) {
    end = start + std::min(Panel::kStretch, sizes.inputs - start);
    weights.enter(start);
    for (int64_t k = start; k < end; k += 2) {
      __m512bh low, high;
      weights.read(k, low, high);
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        __builtin_memcpy(&pair, x + i * sizes.x_stride + k, sizeof(pair));
        const auto both = (__m512bh)_mm512_set1_epi32(pair);
        sums[i][0] = _mm512_dpbf16_ps(sums[i][0], both, low);
        sums[i][1] = _mm512_dpbf16_ps(sums[i][1], both, high);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t output = panel * kPanel + half * kLanes, left = std::min(kLanes, sizes.outputs - output);
    if (left <= 0) break;
    const Vec added = bias == nullptr ? Vec(0) : widen(bias + output, left);
    for (int i = 0; i < kRows; ++i) out.put((row + i) * sizes.outputs + output, Vec(sums[i][half]) + added, left);
  }
}

#else

constexpr int64_t kVectors = kPanel / kLanes;
// Rows of a tile, whose sums, a vector of inputs and one of weights must stay in registers: 16 with AVX2, 32 with
// AVX-512, 32 narrower ones with NEON. NEON, GCC 12, instructions per multiply-add by rows: 1: 3.6, 2: 3.0, 3: 3.2.
constexpr int64_t kTileRows = kVectors == 2 ? 6 : kVectors == 4 ? 3 : 2;
constexpr int64_t kMaxNarrowTiles = 1;

using Pairs = at::vec::Vectorized<int32_t>;
static_assert(Pairs::size() == kLanes);

// A pair's numbers for the first and the second input, as float32.
inline Vec first_of(const Pairs& pairs) { return at::vec::cast<float, int32_t>(pairs << Pairs(16)); }
inline Vec second_of(const Pairs& pairs) {
  return at::vec::cast<float, int32_t>(pairs & Pairs(static_cast<int32_t>(0xFFFF0000)));
}

// The caller calls `enter` with the first input of each stretch, and reads vector j of a pair's outputs.
struct Bf16Panel {
  static constexpr int64_t kStretch = std::numeric_limits<int64_t>::max();

  const at::BFloat16* weights;  // [inputs / 2][32][2]

  PAGEWIRE_INLINE void enter(int64_t) {}
  PAGEWIRE_INLINE void read(int64_t input, int64_t j, Vec& first, Vec& second) const {
    const Pairs pairs = Pairs::loadu(weights + input * kPanel + j * kLanes * 2);
    first = first_of(pairs);
    second = second_of(pairs);
  }
};

template <typename Panel>
PAGEWIRE_INLINE void widen_pair(const Panel& narrow, int64_t input, at::BFloat16* wide) {
  for (int64_t j = 0; j < kVectors; ++j) {
    Vec first, second;
    narrow.read(input, j, first, second);
    const Pairs low = at::vec::cast<int32_t, float>(first) >> Pairs(16) & Pairs(0xFFFF);
    const Pairs high = at::vec::cast<int32_t, float>(second) & Pairs(static_cast<int32_t>(0xFFFF0000));
    (low | high).store(wide + j * kLanes * 2);
  }
}

template <int kRows, typename Panel>
inline void multiply_tile(
    Panel weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out, int64_t row,
    int64_t panel) {
  x += row * sizes.x_stride;
  for (int i = 0; i < kRows; ++i) out.fetch((row + i) * sizes.outputs + panel * kPanel);
  Vec sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vec(0);
  for (int64_t start = 0, end; start < sizes.inputs; start = end) {
    end = start + std::min(Panel::kStretch, sizes.inputs - start);
    weights.enter(start);
    for (int64_t k = start; k < end; k += 2) {
      Vec first[kRows], second[kRows];
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        __builtin_memcpy(&pair, x + i * sizes.x_stride + k, sizeof(pair));
        first[i] = first_of(Pairs(pair));
        second[i] = second_of(Pairs(pair));
      }
      for (int j = 0; j < kVectors; ++j) {
        Vec low, high;
        weights.read(k, j, low, high);
        for (int i = 0; i < kRows; ++i)
          sums[i][j] = at::vec::fmadd(second[i], high, at::vec::fmadd(first[i], low, sums[i][j]));
      }
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    const int64_t output = panel * kPanel + j * kLanes, left = std::min(kLanes, sizes.outputs - output);
    if (left <= 0) break;
    const Vec added = bias == nullptr ? Vec(0) : widen(bias + output, left);
    for (int i = 0; i < kRows; ++i) out.put((row + i) * sizes.outputs + output, sums[i][j] + added, left);
  }
}

#endif

// A panel of narrower weights, converted to bf16.
struct WidePanel : Bf16Panel {
  static constexpr int64_t kStretch = kGroup;

  Ahead ahead;

  PAGEWIRE_INLINE void enter(int64_t) { ahead.fetch(); }
};

template <typename Panel>
Bf16Panel widen_panel(Panel narrow, int64_t inputs) {
  static thread_local Buffer<at::BFloat16> wide;
  if (static_cast<int64_t>(wide.size()) < inputs * kPanel) wide.resize(inputs * kPanel);
  for (int64_t k = 0; k < inputs; k += 2) {
    if (k % kGroup == 0) narrow.enter(k);
    widen_pair(narrow, k, wide.data() + k * kPanel);
  }
  return {wide.data()};
}

// Calls tile(number, panel's weights) for each tile, in order; with many, the panel is widened first. ahead(part,
// parts): what a part of the work prefetches.
template <typename Panel, typename Block, typename Next, typename F>
void for_narrow_tiles(const Block* own, const Next& ahead, int64_t inputs, int64_t tiles, const F& tile) {
  if (tiles <= kMaxNarrowTiles) {
    for (int64_t i = 0; i < tiles; ++i) tile(i, Panel{own, ahead(i, tiles)});
  } else {
    const Bf16Panel wide = widen_panel(Panel{own, ahead(0, tiles + 1)}, inputs);
    for (int64_t i = 0; i < tiles; ++i) tile(i, WidePanel{wide, ahead(i + 1, tiles + 1)});
  }
}

struct Bf16Weights {
  const at::BFloat16* packed;  // [panels, inputs / 2, 32, 2]

  // Calls tile(number, panel's weights) for each tile, in order.
  template <typename F>
  void for_tiles(int64_t panel, int64_t inputs, int64_t tiles, const F& tile) const {
    for (int64_t i = 0; i < tiles; ++i) tile(i, Bf16Panel{packed + panel * kPanel * inputs});
  }
};

#if defined(__AVX512BF16__)
struct Int8Weights {
  const Int8Group* packed;  // [panels, groups]

  template <typename F>
  void for_tiles(int64_t panel, int64_t inputs, int64_t tiles, const F& tile) const {
    const int64_t groups = groups_of(inputs);
    const Int8Group* own = packed + panel * groups;
    const auto ahead = [&](int64_t part, int64_t parts) { return Ahead(own + groups, groups, part, parts, groups); };
    for_narrow_tiles<Int8Panel>(own, ahead, inputs, tiles, tile);
  }
};
#endif

// Rows that all panels multiply, split into nearly equal tiles: 32 rows into 11, 11 and 10.
template <int kMostRows>
struct Chunk {
  int64_t first, rows;

  int64_t tiles() const { return (rows + kMostRows - 1) / kMostRows; }

  // Calls multiply(rows as a compile-time constant, first row) for a tile.
  template <typename F>
  void for_rows(int64_t tile, const F& multiply) const {
    const int64_t start = rows * tile / tiles();
    call<kMostRows>(rows * (tile + 1) / tiles() - start, first + start, multiply);
  }

 private:
  template <int kRows, typename F>
  static void call(int64_t rows, int64_t first, const F& multiply) {
    if constexpr (kRows > 0) {
      if (rows == kRows) return multiply(std::integral_constant<int, kRows>(), first);
      call<kRows - 1>(rows, first, multiply);
    }
  }
};

// Calls multiply(chunk, panel) for all chunks and panels, on several threads.
template <int kMostRows, typename F>
void for_panels(const Sizes& sizes, const F& multiply) {
  const int64_t panels = panels_of(sizes.outputs);
  const int64_t chunks = (sizes.rows + kChunkRows - 1) / kChunkRows;
  parallel_for(chunks * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / panels * kChunkRows;
      multiply(Chunk<kMostRows>{first, std::min(kChunkRows, sizes.rows - first)}, item % panels);
    }
  });
}

// x: [rows, inputs], rows `x_stride` elements apart. bias: [outputs] or null.
template <typename Weights>
void multiply(
    const Weights& weights, const at::BFloat16* x, const Sizes& sizes, const at::BFloat16* bias, const Results& out) {
  for_panels<kTileRows>(sizes, [&](const auto& chunk, int64_t panel) {
    weights.for_tiles(panel, sizes.inputs, chunk.tiles(), [&](int64_t tile, const auto& read) {
      chunk.for_rows(tile, [&](auto rows, int64_t first) {
        multiply_tile<decltype(rows)::value>(read, x, sizes, bias, out, first, panel);
      });
    });
  });
}

}  // namespace pagewire

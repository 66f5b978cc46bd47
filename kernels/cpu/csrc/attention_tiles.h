// How attention multiplies a tile of keys and values: `FloatTiles` for every type, `Bf16Tiles` with the bf16 dot product,
// `Int8Tiles` with that of bytes for numbers that are stored in 8 bits; the others widen these first. All take keys as
// [dim][key] and values as [key][dim], so that no sum ever runs across a vector's lanes. A value that is not finite
// reaches all rows of its item, also earlier ones, and no other sequence.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kv_pool.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kTileKeys = 64;

template <typename T>
struct Attention {
  T* out;          // [tokens, num_heads, head_dim]
  const T* query;  // tokens `query_stride` apart
  KvPool<T> cache;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;  // [num_sequences, table_width]
  int64_t query_stride, table_width;
  int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  const float* bias;      // [num_heads, num_distances], or null
  int64_t num_distances;
  bool causal;
};

// Where the keys and values of a tile lie, as the engine takes them. Zeros are before the first that the item has, and
// follow the last of `count`, so that no code has to check how many there are.
template <typename T>
struct Tile {
  int64_t count = 0;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  // Of a narrow pool; from `begin` to `count` where the engine takes T, which `widen_tile` makes of them.
  int64_t begin = 0;
  const int8_t* narrow_keys[kTileKeys];
  const int8_t* narrow_values[kTileKeys];
};

inline void transpose(const float* source, int64_t source_stride, float* target, int64_t rows, int64_t columns) {
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t row = 0; row < rows; ++row) target[column * kTileKeys + row] = source[row * source_stride + column];
}

// Multiplies in float32; head_dim may be anything.
template <typename T>
class FloatTiles {
 public:
  static constexpr bool kMultipliesNarrow = false;

  void start(const Attention<T>& a, int64_t rows) {
    head_dim_ = a.head_dim;
    queries_.resize(rows * head_dim_);
    tile_.resize(kTileKeys * head_dim_);
    turned_.resize(kTileKeys * head_dim_);
    weights_.resize(rows * kTileKeys);
  }

  void load_query(int64_t row, const T* query) {
    for_each_vector(head_dim_, [&](int64_t i, int64_t n) {
      store(&queries_[row * head_dim_ + i], widen(query + i, n), n);
    });
  }

  // scores: [rows, 64]; scores of keys that do not exist may be anything.
  void score(int64_t rows, const Tile<T>& tile, float* scores) {
    fill_tile(tile.keys);
    transpose(tile_.data(), head_dim_, turned_.data(), kTileKeys, head_dim_);
    constexpr int64_t kVectors = kTileKeys / kLanes;
    for (int64_t row = 0; row < rows; ++row) {
      const float* query = &queries_[row * head_dim_];
      Vec sums[kVectors];
      for (auto& s : sums) s = Vec(0.0f);
      for (int64_t d = 0; d < head_dim_; ++d)
        for (int64_t v = 0; v < kVectors; ++v)
          sums[v] = at::vec::fmadd(Vec(query[d]), Vec::loadu(&turned_[d * kTileKeys + v * kLanes]), sums[v]);
      for (int64_t v = 0; v < kVectors; ++v) sums[v].store(scores + row * kTileKeys + v * kLanes);
    }
  }

  // Weights are powers of this number's exponential.
  static constexpr float kLogBase = 1.0f;
  static Vec power(const Vec& x) { return x.exp(); }

  void keep_weights(int64_t row, int64_t i, const Vec& weights) { weights.store(&weights_[row * kTileKeys + i]); }

  // sums = sums * corrections + weights @ values. sums: [rows, head_dim].
  void add_values(int64_t rows, const Tile<T>& tile, const float* corrections, float* sums) {
    fill_tile(tile.values);
    for (int64_t row = 0; row < rows; ++row) {
      const float* weights = &weights_[row * kTileKeys];
      for_each_vector(head_dim_, [&](int64_t i, int64_t n) {
        float* target = sums + row * head_dim_ + i;
        Vec sum = widen(target, n) * Vec(corrections[row]);
        for (int64_t key = 0; key < tile.count; ++key)
          sum = at::vec::fmadd(Vec(weights[key]), widen(&tile_[key * head_dim_ + i], n), sum);
        store(target, sum, n);
      });
    }
  }

 private:
  void fill_tile(const T* const* vectors) {
    for (int64_t key = 0; key < kTileKeys; ++key)
      for_each_vector(head_dim_, [&](int64_t i, int64_t n) {
        store(&tile_[key * head_dim_ + i], widen(vectors[key] + i, n), n);
      });
  }

  int64_t head_dim_ = 0;
  Buffer<float> queries_, tile_, turned_, weights_;
};

#if defined(__AVX512BF16__)

// 16 vectors of 16 words: afterwards vector i holds word i of each.
[[gnu::always_inline]] inline void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// Adds rows x (kVectors * 16) dot products of words, pairs of bf16 or four bytes, to sums. left: rows of `words` words
// each, `left_stride` words apart; columns(word, right): makes the words of the columns; multiply(sum, left, right).
template <int kVectors, int kRows, typename Sum, typename Columns, typename Multiply>
[[gnu::always_inline]] inline void add_products(
    const uint32_t* left, int64_t left_stride, int64_t words, const Columns& columns, const Multiply& multiply,
    Sum (&sums)[kRows][kVectors]) {
  for (int64_t word = 0; word < words; ++word) {
    __m512i right[kVectors];
    columns(word, right);
    for (int row = 0; row < kRows; ++row) {
      const __m512i same = _mm512_set1_epi32(static_cast<int>(left[row * left_stride + word]));
      for (int v = 0; v < kVectors; ++v) sums[row][v] = multiply(sums[row][v], same, right[v]);
    }
  }
}

// For `add_products`: the columns of words that lie in rows of so many.
inline auto columns_of(const uint32_t* words, int64_t stride) {
  return [=](int64_t word, auto& right) {
    for (auto& vector : right) vector = _mm512_loadu_si512(words + word * stride + (&vector - right) * 16);
  };
}

constexpr int64_t kSumRows = 6;  // by 64 columns of sums fit into registers; even, since `Int8Tiles` has two for a row

// Calls apply(first_row, integral_constant<rows>) for stretches of at most kSumRows rows.
template <typename F>
inline void for_row_stretches(int64_t rows, const F& apply) {
  for (int64_t row = 0; row < rows; row += kSumRows) {
    switch (std::min(kSumRows, rows - row)) {
      case 1: apply(row, std::integral_constant<int, 1>()); break;
      case 2: apply(row, std::integral_constant<int, 2>()); break;
      case 3: apply(row, std::integral_constant<int, 3>()); break;
      case 4: apply(row, std::integral_constant<int, 4>()); break;
      case 5: apply(row, std::integral_constant<int, 5>()); break;
      default: apply(row, std::integral_constant<int, 6>());
    }
  }
}

// Calls apply(integral_constant<vectors>) for as many vectors of 16 columns as so many keys need.
template <typename F>
inline void for_columns(int64_t keys, const F& apply) {
  if (keys > 32) return apply(std::integral_constant<int, 4>());
  if (keys > 16) return apply(std::integral_constant<int, 2>());
  apply(std::integral_constant<int, 1>());
}

// Multiplies pairs of bf16 and sums in float32. head_dim is a multiple of 32.
class Bf16Tiles {
 public:
  using T = at::BFloat16;
  static constexpr bool kMultipliesNarrow = false;

  static bool can(const Attention<T>& a) { return a.head_dim % 32 == 0; }

  void start(const Attention<T>& a, int64_t rows) {
    pairs_ = a.head_dim / 2;
    queries_.resize(rows * pairs_);
    keys_.resize(pairs_ * kTileKeys);
    values_.resize(kTileKeys / 2 * a.head_dim);
    weights_.resize(rows * kTileKeys / 2);
  }

  void load_query(int64_t row, const T* query) { std::memcpy(&queries_[row * pairs_], query, pairs_ * 4); }

  void score(int64_t rows, const Tile<T>& tile, float* scores) {
    for (int64_t group = 0; group < tile.count; group += 16) {
      for (int64_t pair = 0; pair < pairs_; pair += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(tile.keys[group + i] + 2 * pair);
        transpose_words(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(&keys_[(pair + i) * kTileKeys + group], r[i]);
      }
    }
    for_columns(tile.count, [&](auto vectors) { score_columns<vectors()>(rows, scores); });
  }

  // 2 ** x to one part in 9,000, where rounding weights to bf16 loses one in 500; 0 for -inf, and NaN stays NaN.
  // Coefficients: least squares of the relative error at Chebyshev's points of [-1/2, 1/2], the first held at 1.
  static constexpr float kLogBase = 0.6931471806f;
  static Vec power(const Vec& x) {
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-160.0f), x);  // of NaN and a number it is the second
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT);
    const __m512 part = _mm512_sub_ps(bounded, whole);
    __m512 value = _mm512_fmadd_ps(part, _mm512_set1_ps(0.0545928247f), _mm512_set1_ps(0.242217838f));
    value = _mm512_fmadd_ps(part, value, _mm512_set1_ps(0.693368601f));
    value = _mm512_fmadd_ps(part, value, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(value, whole);
  }

  void keep_weights(int64_t row, int64_t i, const Vec& weights) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(&weights_[(row * kTileKeys + i) / 2]), (__m256i)_mm512_cvtneps_pbh(weights));
  }

  void add_values(int64_t rows, const Tile<T>& tile, const float* corrections, float* sums) {
    const int64_t head_dim = 2 * pairs_, key_pairs = (tile.count + 1) / 2;
    if (rows > kSumRows) {
      for (int64_t pair = 0; pair < key_pairs; ++pair)
        for (int v = 0; v < head_dim / 16; ++v)
          _mm512_storeu_si512(&values_[pair * head_dim + v * 16], interleaved(tile, pair, v * 16));
    }
    int64_t column = 0;
    for (; column + 64 <= head_dim; column += 64) add_columns<4>(rows, tile, column, key_pairs, corrections, sums);
    if (column < head_dim) add_columns<2>(rows, tile, column, key_pairs, corrections, sums);
  }

 private:
  static __m512 multiply(__m512 sum, __m512i left, __m512i right) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
  }

  // The values of two neighbouring keys in 16 columns, as pairs.
  [[gnu::always_inline]] static __m512i interleaved(const Tile<T>& tile, int64_t pair, int64_t column) {
    const auto* even = reinterpret_cast<const __m256i*>(tile.values[2 * pair] + column);
    const auto* odd = reinterpret_cast<const __m256i*>(tile.values[2 * pair + 1] + column);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(even));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(odd)), 16);
    return _mm512_or_si512(low, high);
  }

  template <int kVectors>
  void score_columns(int64_t rows, float* scores) {
    for_row_stretches(rows, [&](int64_t row, auto stretch) {
      __m512 products[stretch()][kVectors];
      for (auto& line : products)
        for (auto& product : line) product = _mm512_setzero_ps();
      add_products(&queries_[row * pairs_], pairs_, pairs_, columns_of(keys_.data(), kTileKeys), multiply, products);
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v)
          _mm512_storeu_ps(scores + (row + i) * kTileKeys + v * 16, products[i][v]);
    });
  }

  template <int kVectors>
  void add_columns(
      int64_t rows, const Tile<T>& tile, int64_t column, int64_t key_pairs, const float* corrections, float* sums) {
    const int64_t head_dim = 2 * pairs_;
    for_row_stretches(rows, [&](int64_t row, auto stretch) {
      __m512 products[stretch()][kVectors];
      float* target = sums + row * head_dim + column;
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v)
          products[i][v] =
              _mm512_mul_ps(_mm512_loadu_ps(target + i * head_dim + v * 16), _mm512_set1_ps(corrections[row + i]));
      const uint32_t* weights = &weights_[row * kTileKeys / 2];
      if (rows > kSumRows) {
        add_products(
            weights, kTileKeys / 2, key_pairs, columns_of(&values_[column], head_dim), multiply, products);
      } else {
        const auto columns = [&](int64_t pair, auto& right) {
          for (int v = 0; v < kVectors; ++v) right[v] = interleaved(tile, pair, column + v * 16);
        };
        add_products(weights, kTileKeys / 2, key_pairs, columns, multiply, products);
      }
      for (int i = 0; i < stretch(); ++i)
        for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(target + i * head_dim + v * 16, products[i][v]);
    });
  }

  int64_t pairs_ = 0;
  Buffer<uint32_t> queries_;  // [rows][pairs]
  Buffer<uint32_t> keys_;     // [pairs][64 keys]
  Buffer<uint32_t> values_;   // [pairs of keys][head_dim]
  Buffer<uint32_t> weights_;  // [rows][pairs of keys]
};

#if defined(__AVX512VNNI__)

// Multiplies the numbers of a narrow pool as they are stored, and sums exactly. Queries, and weights times the scales
// of their values, are rounded to 16 bits in steps of the row's own, weights for each tile: a step for all tiles would
// lose small weights beside a large one whose value is small. The two bytes of each are multiplied as two rows. So
// there are as many products as in bf16, but nothing is widened, and half as much turned round. head_dim is a multiple
// of 64.
class Int8Tiles {
 public:
  using T = at::BFloat16;
  static constexpr bool kMultipliesNarrow = true;

  // Larger heads could exceed the 32 bits of a sum.
  static bool can(const Attention<T>& a) {
    return a.cache.narrow != nullptr && a.head_dim % 64 == 0 && a.head_dim <= 512;
  }

  void start(const Attention<T>& a, int64_t rows) {
    head_dim_ = a.head_dim;
    words_ = head_dim_ / 4;
    queries_.resize(2 * rows * words_);
    query_steps_.resize(rows);
    query_sums_.resize(rows);
    keys_.resize(words_ * kTileKeys);
    values_.resize(kTileKeys / 4 * head_dim_);
    products_.resize(rows * kTileKeys);
    weights_.resize(2 * rows * kTileKeys / 4);
    weight_steps_.resize(rows);
  }

  // A query that is not finite has a step that is NaN, and numbers that do not matter.
  void load_query(int64_t row, const T* query) {
    Vec magnitudes(0);
    for (int64_t i = 0; i < head_dim_; i += 16) magnitudes = at::vec::maximum(magnitudes, widen(query + i).abs());
    const float most = largest(magnitudes);
    const bool is_finite = most <= std::numeric_limits<float>::max();
    const Vec factor(is_finite && most > kLeast ? kMostOfQuery / most : 0.0f);
    __m512i sums = _mm512_setzero_si512();
    auto* high = reinterpret_cast<int8_t*>(&queries_[2 * row * words_]);
    for (int64_t i = 0; i < head_dim_; i += 16) {
      const __m512i whole = _mm512_cvtps_epi32(widen(query + i) * factor);
      sums = _mm512_add_epi32(sums, whole);
      // The lower byte is signed.
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + head_dim_ + i), _mm512_cvtepi32_epi8(whole));
    }
    query_sums_[row] = _mm512_reduce_add_epi32(sums);
    query_steps_[row] = is_finite ? most / kMostOfQuery : std::numeric_limits<float>::quiet_NaN();
  }

  void score(int64_t rows, const Tile<T>& tile, float* scores) {
    for (int64_t group = 0; group < tile.count; group += 16) {
      for (int64_t word = 0; word < words_; word += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i)  // as unsigned bytes, which are 128 more
          r[i] = _mm512_xor_si512(
              _mm512_loadu_si512(tile.narrow_keys[group + i] + 4 * word), _mm512_set1_epi8(-128));
        transpose_words(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(&keys_[(word + i) * kTileKeys + group], r[i]);
      }
    }
    for (int64_t key = 0; key < kTileKeys; ++key) {
      std::memcpy(&key_scales_[key], tile.narrow_keys[key] + head_dim_, sizeof(float));
      std::memcpy(&value_scales_[key], tile.narrow_values[key] + head_dim_, sizeof(float));
    }
    for_columns(tile.count, [&](auto vectors) { score_columns<vectors()>(rows, scores); });
  }

  static constexpr float kLogBase = Bf16Tiles::kLogBase;
  static Vec power(const Vec& x) { return Bf16Tiles::power(x); }

  void keep_weights(int64_t row, int64_t i, const Vec& weights) {
    (weights * Vec::loadu(&value_scales_[i])).store(&products_[row * kTileKeys + i]);
  }

  void add_values(int64_t rows, const Tile<T>& tile, const float* corrections, float* sums) {
    const int64_t quads = (tile.count + 3) / 4;
    for (int64_t row = 0; row < rows; ++row) round_weights(row);
    for (int64_t column = 0; column < head_dim_; column += 64) {
      const auto columns = [&](int64_t quad, auto& right) { interleave(tile, quad, column, right); };
      if (2 * rows <= kSumRows) {
        add_columns(rows, quads, columns, corrections, sums + column);
        continue;
      }
      for (int64_t quad = 0; quad < quads; ++quad) {
        __m512i r[4];
        columns(quad, r);
        for (int v = 0; v < 4; ++v) _mm512_storeu_si512(&values_[quad * 64 + v * 16], r[v]);
      }
      add_columns(rows, quads, columns_of(values_.data(), 64), corrections, sums + column);
    }
  }

 private:
  // GCC keeps sums in registers if they are of the type that its dot product has, and __m512i is another.
  using Sums = int32_t __attribute__((vector_size(64)));

  static constexpr float kMostOfQuery = 127 * 256 + 127, kMostOfWeight = 65535;
  static constexpr float kLeast = 1e-33f;  // what is divided by less is infinite

  // Makes numbers of 16 bits of a row's weights, unsigned. As a float that is not negative grows, so do its bits as an
  // integer, and NaN is above all.
  void round_weights(int64_t row) {
    const float* products = &products_[row * kTileKeys];
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) most = _mm512_max_epu32(most, _mm512_loadu_si512(products + i * 16));
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    const __m512 factor = _mm512_set1_ps(largest < kLeast ? 0.0f : kMostOfWeight / largest);
    weight_steps_[row] = largest < kLeast ? 0.0f : largest / kMostOfWeight;
    __m512i whole[4];
    for (int i = 0; i < 4; ++i)
      whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(products + i * 16), factor));
    const __m512i first = _mm512_packus_epi32(whole[0], whole[1]), second = _mm512_packus_epi32(whole[2], whole[3]);
    const __m512i low = _mm512_set1_epi16(255);
    const __m512i halves[] = {
        _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8)),
        _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low))};
    for (int i = 0; i < 2; ++i)
      _mm512_storeu_si512(&weights_[(2 * row + i) * 16], exchanged(halves[i]));
  }

  // Word i of lane j becomes word j of lane i: packing and unpacking go lane by lane.
  [[gnu::always_inline]] static __m512i exchanged(__m512i words) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, words);
  }

  // The values of four neighbouring keys in 64 columns, as words.
  [[gnu::always_inline]] static void interleave(
      const Tile<T>& tile, int64_t quad, int64_t column, __m512i (&words)[4]) {
    __m512i r[4];
    for (int i = 0; i < 4; ++i) r[i] = exchanged(_mm512_loadu_si512(tile.narrow_values[4 * quad + i] + column));
    const __m512i low = _mm512_unpacklo_epi8(r[0], r[1]), high = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i low2 = _mm512_unpacklo_epi8(r[2], r[3]), high2 = _mm512_unpackhi_epi8(r[2], r[3]);
    words[0] = _mm512_unpacklo_epi16(low, low2);
    words[1] = _mm512_unpackhi_epi16(low, low2);
    words[2] = _mm512_unpacklo_epi16(high, high2);
    words[3] = _mm512_unpackhi_epi16(high, high2);
  }

  // Sums of a row's upper and of its lower bytes.
  static __m512 joined(Sums upper, Sums lower) { return _mm512_cvtepi32_ps((__m512i)((upper << 8) + lower)); }

  template <int kVectors>
  void score_columns(int64_t rows, float* scores) {
    const auto multiply = [](Sums sum, __m512i query, __m512i keys) {
      return (Sums)_mm512_dpbusd_epi32((__m512i)sum, keys, query);
    };
    for_row_stretches(2 * rows, [&](int64_t half, auto stretch) {
      const int64_t first = half / 2;
      Sums products[stretch()][kVectors];
      for (int i = 0; i < stretch(); ++i)
        for (auto& product : products[i])
          product = i % 2 == 0 ? Sums{} : (Sums)_mm512_set1_epi32(-128 * query_sums_[first + i / 2]);
      add_products(&queries_[half * words_], words_, words_, columns_of(keys_.data(), kTileKeys), multiply, products);
      for (int i = 0; i < stretch() / 2; ++i) {
        const __m512 step = _mm512_set1_ps(query_steps_[first + i]);
        for (int v = 0; v < kVectors; ++v)
          _mm512_storeu_ps(
              scores + (first + i) * kTileKeys + v * 16,
              _mm512_mul_ps(
                  joined(products[2 * i][v], products[2 * i + 1][v]),
                  _mm512_mul_ps(_mm512_loadu_ps(key_scales_ + v * 16), step)));
      }
    });
  }

  template <typename Columns>
  void add_columns(int64_t rows, int64_t quads, const Columns& columns, const float* corrections, float* sums) {
    const auto multiply = [](Sums sum, __m512i weights, __m512i values) {
      return (Sums)_mm512_dpbusd_epi32((__m512i)sum, weights, values);
    };
    for_row_stretches(2 * rows, [&](int64_t half, auto stretch) {
      Sums products[stretch()][4];
      for (auto& line : products)
        for (auto& product : line) product = Sums{};
      add_products(&weights_[half * 16], 16, quads, columns, multiply, products);
      for (int i = 0; i < stretch() / 2; ++i) {
        const int64_t row = half / 2 + i;
        const __m512 step = _mm512_set1_ps(weight_steps_[row]), correction = _mm512_set1_ps(corrections[row]);
        for (int v = 0; v < 4; ++v) {
          float* target = sums + row * head_dim_ + v * 16;
          const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(target), correction);
          _mm512_storeu_ps(target, _mm512_fmadd_ps(joined(products[2 * i][v], products[2 * i + 1][v]), step, before));
        }
      }
    });
  }

  int64_t head_dim_ = 0, words_ = 0;
  Buffer<uint32_t> queries_;  // [rows][upper and lower bytes][words]
  Buffer<float> query_steps_;
  Buffer<int32_t> query_sums_;
  Buffer<uint32_t> keys_;    // [words][64 keys]
  Buffer<uint32_t> values_;  // [words of four keys][64 columns]
  alignas(64) float key_scales_[kTileKeys], value_scales_[kTileKeys];
  Buffer<float> products_;    // [rows][keys]: weights times the scales of values
  Buffer<uint32_t> weights_;  // [rows][upper and lower bytes][words of four keys]
  Buffer<float> weight_steps_;
};

#endif
#endif

}  // namespace pagewire

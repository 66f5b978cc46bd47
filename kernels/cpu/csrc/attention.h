// Paged attention that reads the blocks in place: no key or value is gathered first.
//
// The work is cut into items: some consecutive query tokens of a sequence with all heads of one key head, which make
// the rows of the item, and the keys that they see. An item walks its keys 64 at a time, keeping for each row the
// largest score, the sum of exponentials and the weighted values so far (the online softmax of Milakov and
// Gimelshein, 2018, as FlashAttention tiles it; Dao et al., 2022). A single query token over a long context is split
// over its keys, and the parts are merged afterwards (flash-decoding; Dao et al., 2023). So are a few, such as guesses
// that are verified, where there is little else to share out: one sequence's on two threads take a fifth less time
// so, and those of eight sequences would take up to an eighth more.
//
// Sequences that begin with the same blocks, as those behind one prompt do, see the parts that these fill together: an
// item has one query token of each of several sequences, and finds and turns round every tile once for all (as cascade
// attention does, Ye et al., 2024, and Hydragen; Juravsky et al., 2024).
//
// What a row comes to depends on its query and its keys alone: not on the batch, the number of threads, or the tokens
// that are computed with it. So a token that is computed in a prompt, in a decode or behind a guess has the same bits.
// Tiles and parts therefore begin at multiples of their sizes, wherever items do; all rows are summed part by part, also
// where the parts are not split; and a key that a row does not see adds zero to it, which changes nothing.
//
// How a tile of keys is multiplied is left to an engine: `FloatTiles` for every type, `Bf16Tiles` with the bf16 dot
// product, `Int8Tiles` with that of bytes for numbers that are stored in 8 bits; the others widen these first. All take
// keys as [dim][key] and values as [key][dim], so that no sum ever runs across a vector's lanes. A value that is not
// finite reaches all rows of its item, also earlier ones, and no other sequence.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "kv_pool.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kItemRows = 32;   // enough that turning a tile of keys round costs a tenth of multiplying it
constexpr int64_t kPartKeys = 512;  // summed by themselves; a multiple of a tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

struct Item {
  int64_t sequence, kv_head;  // of several sequences the first, whose blocks are those of all
  int64_t first_row, tokens;  // of the query
  int64_t first_position;     // of the first token in its sequence; of the last key if attention is not causal
  int64_t keys_begin, keys_end;
  int64_t partial;      // where a part's results go, one for each token, or -1: straight to the output
  int64_t shared = -1;  // the first of its tokens in `Work::shared`, if they are of several sequences
};

// A query token whose sequence shares its keys with others: its row, and where its results of this part go.
struct SharedToken {
  int64_t row, partial;
};

// Tokens whose results are in parts, the parts of each one `tokens` apart.
struct Merge {
  int64_t kv_head, first_row, tokens, partial, count;
};

struct Work {
  std::vector<Item> items;
  std::vector<SharedToken> shared;
  std::vector<Merge> merges;
  int64_t num_partials = 0;

  int64_t row_of(const Item& item, int64_t token) const {
    return item.shared < 0 ? item.first_row + token : shared[item.shared + token].row;
  }
  int64_t partial_of(const Item& item, int64_t token) const {
    return item.shared < 0 ? item.partial + token : shared[item.shared + token].partial;
  }
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
    if (tile.count > 32) {
      score_columns<4>(rows, scores);
    } else if (tile.count > 16) {
      score_columns<2>(rows, scores);
    } else {
      score_columns<1>(rows, scores);
    }
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
    if (tile.count > 32) {
      score_columns<4>(rows, scores);
    } else if (tile.count > 16) {
      score_columns<2>(rows, scores);
    } else {
      score_columns<1>(rows, scores);
    }
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

// Adds a part of a row to what parts before it came to: the largest score, the sum of exponentials, weighted values. A
// part without keys adds nothing, and the first is taken as it is.
inline void merge_part(float* merged, float maximum, float total, const float* sums, int64_t head_dim) {
  if (maximum == -kInfinity) return;
  const float top = merged[0] > maximum ? merged[0] : maximum;  // NaN where the part's is
  const float before = std::exp(merged[0] - top), now = std::exp(maximum - top);
  merged[0] = top;
  merged[1] = merged[1] * before + total * now;
  for_each_vector(head_dim, [&](int64_t d, int64_t n) {
    store(merged + 2 + d, at::vec::fmadd(widen(sums + d, n), Vec(now), widen(merged + 2 + d, n) * Vec(before)), n);
  });
}

template <typename T, typename Tiles>
class Attender {
 public:
  // Names the item that `attend` is called with next, so that its first tile is on its way from memory.
  void expect(const Attention<T>& a, const Item& item) {
    if (item.keys_begin < item.keys_end) locate(a, item, first_tile(item), *coming_);
  }

  // The item must have been expected; then is the one after it, if any. partials: where parts leave their rows:
  // largest score, sum of exponentials, weighted values.
  void attend(const Attention<T>& a, const Work& work, const Item& item, const Item* then, float* partials) {
    const int64_t group = a.num_heads / a.num_kv_heads, rows = item.tokens * group;
    tiles_.start(a, rows);
    begin_part(a, rows);
    offsets_.resize(rows);
    corrections_.assign(rows + kLanes, 0.0f);
    scores_.resize(rows * kTileKeys);
    bool is_merged = false;
    for (int64_t row = 0; row < rows; ++row)
      tiles_.load_query(
          row, a.query + work.row_of(item, row / group) * a.query_stride +
                   (item.kv_head * group + row % group) * a.head_dim);
    for (int64_t key = first_tile(item); key < item.keys_end; key += kTileKeys) {
      if (key % kPartKeys == 0 && key > item.keys_begin) {
        if (!is_merged) begin_merging(a, rows);
        is_merged = true;
        for (int64_t row = 0; row < rows; ++row) merge_row(a, row);
        begin_part(a, rows);
      }
      std::swap(current_, coming_);
      if constexpr (!Tiles::kMultipliesNarrow)
        if (a.cache.narrow != nullptr) widen_tile(a);
      if (key + kTileKeys < item.keys_end) {
        locate(a, item, key + kTileKeys, *coming_);
      } else if (then != nullptr) {
        expect(a, *then);
      }
      tiles_.score(rows, *current_, scores_.data());
      if (a.soft_cap > 0) cap(a, rows);
      if (a.bias != nullptr) add_bias(a, item, item.first_position - key, rows, group);
      hide(a, item.first_position - key, rows, group);
      weigh(rows, (a.soft_cap > 0 || a.bias != nullptr ? 1.0f : a.scale) / Tiles::kLogBase);
      tiles_.add_values(rows, *current_, corrections_.data(), sums_.data());
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (is_merged) merge_row(a, row);
      finish(a, work, item, row, group, is_merged, partials);
    }
  }

 private:
  static int64_t first_tile(const Item& item) { return item.keys_begin / kTileKeys * kTileKeys; }

  void begin_part(const Attention<T>& a, int64_t rows) {
    maxima_.assign(rows, -kInfinity);
    totals_.assign(rows * kLanes, 0.0f);
    sums_.assign(rows * a.head_dim, 0.0f);
  }

  void begin_merging(const Attention<T>& a, int64_t rows) {
    merged_.assign(rows * (a.head_dim + 2), 0.0f);
    for (int64_t row = 0; row < rows; ++row) merged_[row * (a.head_dim + 2)] = -kInfinity;
  }

  // Merges a row of the part that has been summed with those before it.
  void merge_row(const Attention<T>& a, int64_t row) {
    merge_part(
        &merged_[row * (a.head_dim + 2)], maxima_[row] * Tiles::kLogBase, sum(Vec::loadu(&totals_[row * kLanes])), &sums_[row * a.head_dim],
        a.head_dim);
  }

  // Finds a tile and asks memory for it.
  void locate(const Attention<T>& a, const Item& item, int64_t first, Tile<T>& tile) {
    tile.count = std::min(kTileKeys, item.keys_end - first);
    const int64_t begin = std::max<int64_t>(0, item.keys_begin - first);
    tile.begin = begin;
    if (a.cache.narrow != nullptr) {
      find(a, item, first + begin, a.cache.narrow, tile.narrow_keys, tile.narrow_values, tile);
    } else {
      find(a, item, first + begin, a.cache.wide, tile.keys, tile.values, tile);
    }
    if (static_cast<int64_t>(zeros_.size()) < a.head_dim + kScaleBytes)
      zeros_.assign(a.head_dim + kScaleBytes, T(0.0f));
    const auto fill = [&](auto** vectors, const auto* zeros) {
      std::fill(vectors, vectors + begin, zeros);
      std::fill(vectors + tile.count, vectors + kTileKeys, zeros);
    };
    if constexpr (Tiles::kMultipliesNarrow) {
      for (const int8_t** heads : {tile.narrow_keys, tile.narrow_values})
        fill(heads, reinterpret_cast<const int8_t*>(zeros_.data()));
    } else {
      for (const T** vectors : {tile.keys, tile.values}) fill(vectors, zeros_.data());
    }
  }

  // Writes down where a tile's keys and values lie, from its first key in the sequence on. pool: the cache's, of E.
  template <typename E>
  static void find(
      const Attention<T>& a, const Item& item, int64_t first, const E* pool, const E** keys, const E** values,
      const Tile<T>& tile) {
    const int32_t* table = a.block_tables + item.sequence * a.table_width;
    const int64_t head = a.cache.head_size(a.head_dim), token_stride = a.num_kv_heads * head;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int64_t i = tile.begin; i < tile.count; ++block, offset = 0) {
      const E* key = pool + table[block] * a.cache.block_stride + offset * token_stride + item.kv_head * head;
      for (int64_t end = std::min(tile.count, i + a.block_size - offset); i < end; ++i, key += token_stride) {
        keys[i] = key;
        values[i] = key + a.cache.part_stride;
        for (int64_t d = 0; d < head; d += 64 / static_cast<int64_t>(sizeof(E))) {
          __builtin_prefetch(key + d, 0, 2);
          __builtin_prefetch(key + a.cache.part_stride + d, 0, 2);
        }
      }
    }
  }

  // Makes keys and values of T of the current tile's narrow ones.
  void widen_tile(const Attention<T>& a) {
    widened_.resize(2 * kTileKeys * a.head_dim);
    T* target = widened_.data();
    for (int64_t i = current_->begin; i < current_->count; ++i)
      for (const auto& [narrow, wide] :
           {std::pair(current_->narrow_keys[i], &current_->keys[i]),
            std::pair(current_->narrow_values[i], &current_->values[i])}) {
        widen_head(narrow, a.head_dim, target);
        *wide = target;
        target += a.head_dim;
      }
  }

  void cap(const Attention<T>& a, int64_t rows) {
    for (int64_t i = 0; i < rows * kTileKeys; i += kLanes)
      ((Vec::loadu(&scores_[i]) * Vec(a.scale / a.soft_cap)).tanh() * Vec(a.soft_cap)).store(&scores_[i]);
  }

  // Scales the scores and adds to each the bias of its key's distance; what is added for keys behind the row's token
  // may be anything. distance: as `hide` has it. Neighbouring keys have neighbouring entries, in the opposite order:
  // one load for a vector, but where it reaches past an end of the table it takes them one by one. Inlined it would take
  // registers from `attend`, and a prompt in float32 without a bias a tenth more time.
  [[gnu::noinline]] void add_bias(
      const Attention<T>& a, const Item& item, int64_t distance, int64_t rows, int64_t group) {
    const int64_t last = a.num_distances - 1;
    for (int64_t row = 0; row < rows; ++row) {
      const float* bias = a.bias + (item.kv_head * group + row % group) * a.num_distances;
      for (int64_t i = 0; i < kTileKeys; i += kLanes) {
        const int64_t farthest = distance + row / group - i, nearest = farthest - kLanes + 1;
        Vec added(bias[last]);
        if (nearest >= 0 && farthest <= last) {
          added = at::vec::flip(Vec::loadu(bias + nearest));
        } else if (nearest < last) {
          float near[kLanes];
          for (int64_t lane = 0; lane < kLanes; ++lane)
            near[lane] = bias[std::clamp<int64_t>(farthest - lane, 0, last)];
          added = Vec::loadu(near);
        }
        float* scores = &scores_[row * kTileKeys + i];
        at::vec::fmadd(Vec::loadu(scores), Vec(a.scale), added).store(scores);
      }
    }
  }

  // Masks the scores of keys that a row does not see. distance: from the tile's first key to the first row's token.
  void hide(const Attention<T>& a, int64_t distance, int64_t rows, int64_t group) {
    const int64_t last_token = (rows - 1) / group;
    const bool all_behind = distance + 1 >= kTileKeys && current_->count == kTileKeys;
    if (all_behind && (a.window == 0 || distance + last_token < a.window)) return;
    for (int64_t row = 0; row < rows; ++row) {
      float* scores = &scores_[row * kTileKeys];
      const int64_t behind = std::clamp<int64_t>(distance + row / group + 1, 0, current_->count);
      const int64_t before = a.window > 0 ? std::clamp<int64_t>(distance + row / group + 1 - a.window, 0, behind) : 0;
      std::fill(scores, scores + before, -kInfinity);
      std::fill(scores + behind, scores + kTileKeys, -kInfinity);
    }
  }

  // Turns scores, still to be scaled, into weights. One pass over the rows for each stage, since the stages of one row
  // wait on each other.
  void weigh(int64_t rows, float scale) {
    for (int64_t row = 0; row < rows; ++row) {
      Vec best = Vec::loadu(&scores_[row * kTileKeys]);
      for (int64_t i = kLanes; i < kTileKeys; i += kLanes)
        best = at::vec::maximum(best, Vec::loadu(&scores_[row * kTileKeys + i]));
      const float found = largest(best) * scale, before = maxima_[row];  // as powers of the base
      maxima_[row] = before > found ? before : found;  // NaN where it is found, and then corrections are NaN for good
      // Before any key is seen, 0 instead of -inf: the number that is subtracted from -inf must be finite.
      offsets_[row] = maxima_[row] == -kInfinity ? 0.0f : maxima_[row];
      corrections_[row] = before - offsets_[row];
    }
    for (int64_t row = 0; row < rows; row += kLanes)
      Tiles::power(Vec::loadu(&corrections_[row])).store(&corrections_[row]);
    for (int64_t row = 0; row < rows; ++row) {
      const Vec offset(-offsets_[row]), factor(scale);
      Vec total = Vec::loadu(&totals_[row * kLanes]) * Vec(corrections_[row]);
      for (int64_t i = 0; i < kTileKeys; i += kLanes) {
        const Vec score = Vec::loadu(&scores_[row * kTileKeys + i]);
        const Vec weight = Tiles::power(at::vec::fmadd(score, factor, offset));
        total = total + weight;
        tiles_.keep_weights(row, i, weight);
      }
      total.store(&totals_[row * kLanes]);
    }
  }

  void finish(
      const Attention<T>& a, const Work& work, const Item& item, int64_t row, int64_t group, bool is_merged,
      float* partials) {
    const float* merged = is_merged ? &merged_[row * (a.head_dim + 2)] : nullptr;
    const float* sums = is_merged ? merged + 2 : &sums_[row * a.head_dim];
    const float total = is_merged ? merged[1] : sum(Vec::loadu(&totals_[row * kLanes]));
    if (item.partial >= 0) {
      float* target = partials + (work.partial_of(item, row / group) * group + row % group) * (a.head_dim + 2);
      target[0] = maxima_[row] * Tiles::kLogBase;
      target[1] = total;
      std::copy_n(sums, a.head_dim, target + 2);
      return;
    }
    T* target =
        a.out + ((item.first_row + row / group) * a.num_heads + item.kv_head * group + row % group) * a.head_dim;
    const Vec scale(1.0f / total);
    for_each_vector(a.head_dim, [&](int64_t i, int64_t n) { store(target + i, widen(sums + i, n) * scale, n); });
  }

  Tiles tiles_;
  Tile<T> pair_[2];
  Tile<T>*current_ = &pair_[0], *coming_ = &pair_[1];
  Buffer<T> zeros_, widened_;
  Buffer<float> maxima_, offsets_, totals_, corrections_, sums_, scores_;
  Buffer<float> merged_;  // [rows]: the largest score, the sum of exponentials, the weighted values
};

// The parts of one row lie `stride` floats apart.
template <typename T>
void merge_parts(const float* part, int64_t count, int64_t stride, int64_t head_dim, T* out) {
  std::vector<float> merged(head_dim + 2, 0.0f);
  merged[0] = -kInfinity;
  for (int64_t i = 0; i < count; ++i)
    merge_part(merged.data(), part[i * stride], part[i * stride + 1], part + i * stride + 2, head_dim);
  const Vec scale(1.0f / merged[1]);
  for_each_vector(head_dim, [&](int64_t d, int64_t n) { store(out + d, widen(&merged[2 + d], n) * scale, n); });
}

// A decode of several parts.
struct Decode {
  int64_t sequence, row, end;
  int64_t num_shared = 0;  // parts that it sees with others
};

// Finds decodes whose contexts begin with the same blocks, part by part: those that share a part are among those that
// share the part before it. Without any, that is one look-up for each.
template <typename T>
std::vector<std::vector<size_t>> alike(const Attention<T>& a, const std::vector<Decode>& decodes) {
  std::vector<std::vector<size_t>> groups;
  std::unordered_map<int32_t, size_t> by_block;
  for (size_t i = 0; i < decodes.size(); ++i) {
    const auto [found, is_new] = by_block.try_emplace(a.block_tables[decodes[i].sequence * a.table_width], groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(i);
  }
  return groups;
}

// Of a group, those that have a whole part behind this many and the same blocks in it, by these.
template <typename T>
std::vector<std::vector<size_t>> alike_in_part(
    const Attention<T>& a, const std::vector<Decode>& decodes, const std::vector<size_t>& group, int64_t part) {
  const int64_t first = part * kPartKeys / a.block_size, last = ((part + 1) * kPartKeys - 1) / a.block_size + 1;
  const auto table = [&](size_t i) { return a.block_tables + decodes[i].sequence * a.table_width; };
  std::vector<std::vector<size_t>> groups;
  for (const size_t i : group) {
    if (decodes[i].end <= (part + 1) * kPartKeys) continue;
    auto found = groups.begin();
    while (found != groups.end() && !std::equal(table(i) + first, table(i) + last, table(found->front()) + first))
      ++found;
    if (found == groups.end()) found = groups.emplace(found);
    found->push_back(i);
  }
  return groups;
}

template <typename T>
Work cut_into_items(const Attention<T>& a) {
  Work work;
  std::vector<Decode> decodes;
  const int64_t tokens_an_item = std::max<int64_t>(1, kItemRows / (a.num_heads / a.num_kv_heads));
  const bool is_little = a.num_sequences * a.num_kv_heads < 2 * at::get_num_threads();
  const bool can_share = a.window == 0 && a.bias == nullptr;
  const auto add_parts = [&](Item item, int64_t begin, int64_t end, int64_t num_shared) {
    // Those of the parts that it sees with others come first.
    work.merges.push_back({item.kv_head, item.first_row, item.tokens, work.num_partials, num_shared});
    work.num_partials += num_shared * item.tokens;
    for (int64_t key = std::max(begin, num_shared * kPartKeys); key < end; key = item.keys_end) {
      item.keys_begin = key;
      item.keys_end = std::min((key / kPartKeys + 1) * kPartKeys, end);
      item.partial = work.num_partials;
      work.items.push_back(item);
      work.num_partials += item.tokens;
      ++work.merges.back().count;
    }
  };
  for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence) {
    const int64_t start = a.query_start[sequence], queries = a.query_start[sequence + 1] - start;
    const int64_t computed = a.context_lens[sequence] - queries;
    for (int64_t token = 0; token < queries; token += tokens_an_item) {
      const int64_t tokens = std::min(tokens_an_item, queries - token);
      // Tokens that see all keys have the last key's place or follow it.
      const int64_t position = a.causal ? computed + token : a.context_lens[sequence] - 1;
      const int64_t begin = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
      const int64_t end = a.causal ? position + tokens : a.context_lens[sequence];
      const bool is_few = queries == 1 || (is_little && queries <= tokens_an_item);
      const bool split = is_few && begin / kPartKeys < (end - 1) / kPartKeys;
      if (split && queries == 1 && can_share) {
        decodes.push_back({sequence, start, end});
        continue;
      }
      for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
        const Item item{sequence, kv_head, start + token, tokens, position, begin, end, -1};
        if (split) {
          add_parts(item, begin, end, 0);
        } else {
          work.items.push_back(item);
        }
      }
    }
  }
  auto groups = alike(a, decodes);
  std::vector<std::pair<int64_t, std::vector<size_t>>> shared;  // parts, and the decodes that see each together
  for (int64_t part = 0; !groups.empty(); ++part) {
    std::vector<std::vector<size_t>> longer;
    for (const auto& group : groups) {
      if (group.size() < 2) continue;
      for (auto& found : alike_in_part(a, decodes, group, part)) {
        if (found.size() < 2) continue;
        for (const size_t i : found) ++decodes[i].num_shared;
        shared.emplace_back(part, found);
        longer.push_back(std::move(found));
      }
    }
    groups = std::move(longer);
  }
  const auto first_merge = static_cast<int64_t>(work.merges.size());
  for (const Decode& decode : decodes)
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head)
      add_parts({decode.sequence, kv_head, decode.row, 1, decode.end - 1, 0, 0, 0}, 0, decode.end, decode.num_shared);
  const auto num_own = static_cast<int64_t>(work.items.size());
  for (const auto& [part, group] : shared)
    for (size_t first = 0; first < group.size(); first += tokens_an_item)
      for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
        const int64_t begin = part * kPartKeys, end = begin + kPartKeys;
        const auto tokens = std::min<int64_t>(tokens_an_item, group.size() - first);
        // All keys are behind all tokens, wherever these are.
        work.items.push_back(
            {decodes[group[first]].sequence, kv_head, 0, tokens, end, begin, end, 0,
             static_cast<int64_t>(work.shared.size())});
        for (int64_t i = 0; i < tokens; ++i) {
          const auto decode = static_cast<int64_t>(group[first + i]);
          work.shared.push_back(
              {decodes[decode].row, work.merges[first_merge + decode * a.num_kv_heads + kv_head].partial + part});
        }
      }
  std::rotate(work.items.begin(), work.items.begin() + num_own, work.items.end());  // the longest first
  return work;
}

template <typename T, typename Tiles>
void paged_attention(const Attention<T>& a) {
  const Work work = cut_into_items(a);
  const std::vector<Item>& items = work.items;
  const int64_t group = a.num_heads / a.num_kv_heads, stride = group * (a.head_dim + 2);
  std::vector<float> partials(work.num_partials * stride);
  // Items differ in length, so each thread takes the next when it is done with its own; while there are plenty it does
  // so one ahead, so that the next keys are on their way from memory.
  const size_t plenty = 2 * static_cast<size_t>(at::get_num_threads());
  std::atomic<size_t> next{0};
  Team::run(at::get_num_threads(), [&](int64_t) {
    static thread_local Attender<T, Tiles> attender;
    bool expected = false;
    for (size_t i = next++; i < items.size();) {
      if (!expected) attender.expect(a, items[i]);
      const size_t then = next.load() + plenty <= items.size() ? next++ : items.size();
      expected = then < items.size();
      attender.attend(a, work, items[i], expected ? &items[then] : nullptr, partials.data());
      i = expected ? then : next++;
    }
  });
  for (const Merge& merge : work.merges)
    for (int64_t row = 0; row < merge.tokens * group; ++row)
      merge_parts(
          partials.data() + merge.partial * stride + row * (a.head_dim + 2), merge.count, merge.tokens * stride,
          a.head_dim,
          a.out + ((merge.first_row + row / group) * a.num_heads + merge.kv_head * group + row % group) * a.head_dim);
}

}  // namespace pagewire

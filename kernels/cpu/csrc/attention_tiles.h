// Tile engines, which multiply queries by a tile of keys, and softmax weights by its values. `FloatTiles` supports
// every type, `Bf16Tiles` has bf16 dot products, and `Int8Tiles` multiplies int8 that other engines first convert. All
// read keys as [dim][key] and values as [key][dim], so that no sum crosses lanes. A value that is not finite makes all
// rows of its item not finite, even earlier tokens', but no other items.
#pragma once

#include "kv_pool.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kTileKeys = 64;

template <typename T>
struct Attention {
  T* out;          // [tokens, num_heads, head_dim]
  const T* query;  // `query_stride` elements from token to token
  KvPool<T> cache;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;  // [num_sequences, table_width]
  int64_t query_stride, table_width;
  int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  float scale, soft_cap;  // soft_cap 0: no cap
  int64_t window;         // 0: no window
  const float* bias;      // [num_heads, num_distances], or null
  int64_t num_distances;
  bool causal;
  const float* sinks;  // [num_heads], or null
  bool chunked;        // tokens attend to their own chunk of `window` tokens
  const int32_t* visible_ends;  // [tokens]: the last position that each attends to, or null: its own

  // The last key that the token of a row of the query, at a position, attends to.
  int64_t last_key(int64_t row, int64_t position) const {
    return visible_ends == nullptr ? position : visible_ends[row];
  }

  // The first key that the token at a position attends to.
  int64_t first_key(int64_t position) const {
    if (window == 0) return 0;
    return chunked ? position / window * window : std::max<int64_t>(0, position - window + 1);
  }
};

// A tile's keys and values. Before the item's first key and after its last, they point to zeros, so that engines need
// not check.
template <typename T>
struct Tile {
  int64_t count = 0;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  // In an 8-bit KV cache. If the engine multiplies type T, `widen_tile` converts the entries [begin, count) to T.
  int64_t begin = 0;
  const int8_t* narrow_keys[kTileKeys];
  const int8_t* narrow_values[kTileKeys];
};

inline void transpose(const float* source, int64_t source_stride, float* target, int64_t rows, int64_t columns) {
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t row = 0; row < rows; ++row) target[column * kTileKeys + row] = source[row * source_stride + column];
}

// Multiplies in float32, with any head_dim.
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

  // scores: [rows, 64], arbitrary without a key.
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

  // Softmax weights are powers of e ** kLogBase.
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

}  // namespace pagewire

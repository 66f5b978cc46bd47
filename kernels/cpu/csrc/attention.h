// Paged attention on the CPU, with keys and values read in place.
//
// Work is split into items (attention_items.h): a few consecutive query tokens of a sequence, and their keys. A row is
// a query token with one of the query heads of a key head. Tiles have 64 keys; a row keeps its largest score, sum of
// exponentials and weighted values (online softmax, Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).
// Long contexts of single query tokens are split into parts, whose results are merged (flash-decoding; Dao et al.,
// 2023). Keys of verified drafts are split, too, if the threads have little other work: on two threads, 1 sequence is
// 20% faster, 8 would be up to an eighth slower.
//
// Parts in blocks that several sequences share are computed once: an item then has one query token of each sequence,
// and transposes each tile once for all (cascade attention, Ye et al., 2024; Hydragen, Juravsky et al., 2024).
//
// Attention is batch-invariant: a row's bits depend only on its query and keys. Tiles and parts of keys therefore begin
// at multiples of their sizes, sums are computed part by part even in one item, and masked keys add zero.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_items.h"
#include "attention_tiles.h"
#include "attention_tiles_bf16.h"
#include "attention_tiles_int8.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Merges a part's largest score, sum of exponentials and weighted values into those of earlier parts. A part without
// unmasked keys changes nothing. The first part is copied.
inline void merge_part(float* merged, float maximum, float total, const float* sums, int64_t head_dim) {
  if (maximum == -kInfinity) return;
  const float top = merged[0] > maximum ? merged[0] : maximum;  // NaN if the part's score is NaN
  const float before = std::exp(merged[0] - top), now = std::exp(maximum - top);
  merged[0] = top;
  merged[1] = merged[1] * before + total * now;
  for_each_vector(head_dim, [&](int64_t d, int64_t n) {
    store(merged + 2 + d, at::vec::fmadd(widen(sums + d, n), Vec(now), widen(merged + 2 + d, n) * Vec(before)), n);
  });
}

// The factor of a row's weighted values, from its largest score and its sum of exponentials. The sink's score takes part
// in the sum only; without a sink the factor is the sum's inverse. It is added last, so that all splits agree.
inline float scale_of(float maximum, float total, const float* sink) {
  if (sink == nullptr) return 1.0f / total;
  const float top = std::max(maximum, *sink);
  const float factor = std::exp(maximum - top);
  return factor / (total * factor + std::exp(*sink - top));
}

template <typename T, typename Tiles>
class Attender {
 public:
  // Announces the next item of `attend`, whose first tile is prefetched.
  void expect(const Attention<T>& a, const Item& item) {
    if (item.keys_begin < item.keys_end) locate(a, item, first_tile(item), *coming_);
  }

  // Computes an item that `expect` has announced. then: this thread's next item, or null. partials: for the parts'
  // results, of each row the largest score, the sum of exponentials and the weighted values.
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
      hide(a, item, key, rows, group);
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

  // Merges a row's current part into all earlier ones.
  void merge_row(const Attention<T>& a, int64_t row) {
    merge_part(
        &merged_[row * (a.head_dim + 2)], maxima_[row] * Tiles::kLogBase, sum(Vec::loadu(&totals_[row * kLanes])), &sums_[row * a.head_dim],
        a.head_dim);
  }

  // Finds the addresses of a tile's keys and values, and prefetches both.
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

  // first: position of the tile's first key. pool: memory of the KV cache, of type E.
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

  // Converts the tile's 8-bit keys and values to T.
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

  // Scales scores, and adds the bias by distance. Scores after the row's token are arbitrary. distance: from the tile's
  // first key to the first row's token. Neighbouring keys' biases are neighbours in reverse order, so one load fills a
  // vector, but one load a key at the table's ends. Inlined, it would take registers of `attend`: a float32 prompt
  // without bias would take a tenth more time.
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

  // Masks keys that a row must not see. key: of the tile's first key.
  void hide(const Attention<T>& a, const Item& item, int64_t key, int64_t rows, int64_t group) {
    const int64_t position = item.first_position;
    const bool all_behind = position - key + 1 >= kTileKeys && current_->count == kTileKeys;
    if (all_behind && a.first_key(position + (rows - 1) / group) <= key) return;
    for (int64_t row = 0; row < rows; ++row) {
      float* scores = &scores_[row * kTileKeys];
      const int64_t token = position + row / group;
      const int64_t last = a.last_key(item.first_row + row / group, token);
      const int64_t behind = std::clamp<int64_t>(last - key + 1, 0, current_->count);
      const int64_t before = std::clamp<int64_t>(a.first_key(token) - key, 0, behind);
      std::fill(scores, scores + before, -kInfinity);
      std::fill(scores + behind, scores + kTileKeys, -kInfinity);
    }
  }

  // Softmax weights from unscaled scores. Each stage is a pass over all rows, because a row's stages wait for each
  // other.
  void weigh(int64_t rows, float scale) {
    for (int64_t row = 0; row < rows; ++row) {
      Vec best = Vec::loadu(&scores_[row * kTileKeys]);
      for (int64_t i = kLanes; i < kTileKeys; i += kLanes)
        best = at::vec::maximum(best, Vec::loadu(&scores_[row * kTileKeys + i]));
      const float found = largest(best) * scale, before = maxima_[row];  // as logarithms to the base
      maxima_[row] = before > found ? before : found;  // NaN if `found` is NaN; corrections then stay NaN
      // Without an unmasked key, the offset is 0, because -inf minus -inf is NaN.
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
    const int64_t head = item.kv_head * group + row % group;
    T* target = a.out + ((item.first_row + row / group) * a.num_heads + head) * a.head_dim;
    const float maximum = is_merged ? merged[0] : maxima_[row] * Tiles::kLogBase;
    const Vec scale(scale_of(maximum, total, a.sinks == nullptr ? nullptr : a.sinks + head));
    for_each_vector(a.head_dim, [&](int64_t i, int64_t n) { store(target + i, widen(sums + i, n) * scale, n); });
  }

  Tiles tiles_;
  Tile<T> pair_[2];
  Tile<T>*current_ = &pair_[0], *coming_ = &pair_[1];
  Buffer<T> zeros_, widened_;
  Buffer<float> maxima_, offsets_, totals_, corrections_, sums_, scores_;
  Buffer<float> merged_;  // [rows]: the largest score, the sum of exponentials, the weighted values
};

// Merges a row's `count` parts. part: the first part's results; parts are `stride` floats apart. sink: or null.
template <typename T>
void merge_parts(const float* part, int64_t count, int64_t stride, int64_t head_dim, const float* sink, T* out) {
  std::vector<float> merged(head_dim + 2, 0.0f);
  merged[0] = -kInfinity;
  for (int64_t i = 0; i < count; ++i)
    merge_part(merged.data(), part[i * stride], part[i * stride + 1], part + i * stride + 2, head_dim);
  const Vec scale(scale_of(merged[0], merged[1], sink));
  for_each_vector(head_dim, [&](int64_t d, int64_t n) { store(out + d, widen(&merged[2 + d], n) * scale, n); });
}

template <typename T, typename Tiles>
void paged_attention(const Attention<T>& a) {
  const Work work = cut_into_items(a);
  const std::vector<Item>& items = work.items;
  const int64_t group = a.num_heads / a.num_kv_heads, stride = group * (a.head_dim + 2);
  std::vector<float> partials(work.num_partials * stride);
  // Items differ in keys, so threads take the next item when done. While many are left, the next is reserved early, to
  // prefetch its keys.
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
    for (int64_t row = 0; row < merge.tokens * group; ++row) {
      const int64_t head = merge.kv_head * group + row % group;
      merge_parts(
          partials.data() + merge.partial * stride + row * (a.head_dim + 2), merge.count, merge.tokens * stride,
          a.head_dim, a.sinks == nullptr ? nullptr : a.sinks + head,
          a.out + ((merge.first_row + row / group) * a.num_heads + head) * a.head_dim);
    }
}

}  // namespace pagewire

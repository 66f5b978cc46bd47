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
// How a tile of keys is multiplied is left to an engine: see attention_tiles.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <vector>

#include "attention_tiles.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

constexpr int64_t kItemRows = 32;   // enough that turning a tile of keys round costs a tenth of multiplying it
constexpr int64_t kPartKeys = 512;  // summed by themselves; a multiple of a tile
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

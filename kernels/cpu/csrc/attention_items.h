// Splits attention into items, which attention.h explains.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "attention_tiles.h"

namespace pagewire {

constexpr int64_t kItemRows = 32;  // transposing a tile of keys then costs a tenth of multiplying it
constexpr int64_t kPartKeys = 512;  // keys of a part; a multiple of a tile

struct Item {
  int64_t sequence, kv_head;  // the first sequence, if several sequences share blocks
  int64_t first_row, tokens;  // rows of the query
  int64_t first_position;  // of the first token; not causal: of the last key
  int64_t keys_begin, keys_end;
  int64_t partial;      // place of a part's results, one for each token; -1: write to the output
  int64_t shared = -1;  // first token in `Work::shared` if the tokens belong to several sequences
};

// A query token of an item for several sequences: its row, and the place of its results for the part.
struct SharedToken {
  int64_t row, partial;
};

// Query tokens with split keys. A token's consecutive parts are `tokens` entries apart.
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

// A sequence's only query token, with keys in several parts.
struct Decode {
  int64_t sequence, row, end;
  int64_t num_shared = 0;  // parts shared with other decodes
};

// Groups decodes by their first block; `alike_in_part` then splits groups part by part, because shared parts come
// first. Without shared blocks, the cost is one look-up in a hash table a decode.
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

// Splits a group by the blocks of part number `part`. Decodes without keys after this part are left out.
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
    // Parts shared with other decodes come first.
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
      // Not causal: all tokens get the position of the last key, and so see all keys.
      const int64_t position = a.causal ? computed + token : a.context_lens[sequence] - 1;
      const int64_t begin = a.first_key(position);
      int64_t end = a.causal ? position + tokens : a.context_lens[sequence];
      for (int64_t i = 0; a.visible_ends != nullptr && i < tokens; ++i)
        end = std::max<int64_t>(end, a.visible_ends[start + token + i] + 1);
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
  std::vector<std::pair<int64_t, std::vector<size_t>>> shared;  // number of a part, and its decodes
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
        // Position `end`: shared keys come before all query tokens, and are never masked.
        work.items.push_back(
            {decodes[group[first]].sequence, kv_head, 0, tokens, end, begin, end, 0,
             static_cast<int64_t>(work.shared.size())});
        for (int64_t i = 0; i < tokens; ++i) {
          const auto decode = static_cast<int64_t>(group[first + i]);
          work.shared.push_back(
              {decodes[decode].row, work.merges[first_merge + decode * a.num_kv_heads + kv_head].partial + part});
        }
      }
  std::rotate(work.items.begin(), work.items.begin() + num_own, work.items.end());  // longest items first
  return work;
}

}  // namespace pagewire

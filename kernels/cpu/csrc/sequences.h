// The sequences of a step in a layer with states: each sequence has its state in one block.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagewire {

struct Sequences {
  const int32_t* starts;    // [count + 1]: first rows, then the number of all rows
  const int32_t* contexts;  // [count]: tokens up to the sequence's last row
  const int32_t* blocks;    // [count], `stride` numbers apart
  int64_t stride, count;

  int64_t tokens(int64_t sequence) const { return starts[sequence + 1] - starts[sequence]; }
  int64_t block(int64_t sequence) const { return blocks[sequence * stride]; }
  // Whether the context begins in this step. The state is then zeros, whatever the block contains.
  bool is_new(int64_t sequence) const { return contexts[sequence] == tokens(sequence); }
  // The sequence of a row.
  int64_t of(int64_t row) const { return std::upper_bound(starts, starts + count + 1, row) - starts - 1; }
};

}  // namespace pagewire

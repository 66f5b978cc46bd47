// Causal convolution of each channel with its last few inputs. Defined in kernels/states.py.
//
// Outputs are computed first, in parallel over rows and channels, then the states, in parallel over sequences and
// channels: an output needs either an old state or rows of x.
#pragma once

#include "layer.h"
#include "sequences.h"
#include "team.h"
#include "vectors.h"

namespace pagewire {

template <typename T, typename W>
struct Convolution {
  T* out;           // [rows, channels]
  const T* x;       // [rows, channels], rows `x_stride` elements apart
  const W* weight;  // [channels, taps], for the oldest input first
  const W* bias;    // [channels] or null
  T* states;        // [blocks, channels, taps - 1], blocks `state_stride` elements apart: the last inputs
  int64_t x_stride, state_stride, channels, taps;
  bool silu;
  Sequences sequences;
};

constexpr int64_t kConvolvedChannels = 256;
constexpr int64_t kConvolvedRows = 64;  // share transposed weights

// Outputs of rows [row, end) and `count` channels from `channel` on.
template <typename T, typename W>
void convolve(const Convolution<T, W>& c, int64_t row, int64_t end, int64_t channel, int64_t count) {
  static thread_local Buffer<float> weights;  // [taps, count]
  static thread_local Buffer<T> past;         // [taps - 1, count]
  static thread_local Buffer<const T*> inputs;  // [taps]
  const int64_t old = c.taps - 1;
  weights.resize(c.taps * kConvolvedChannels);
  past.resize(old * kConvolvedChannels);
  inputs.resize(c.taps);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < c.taps; ++j)
      weights[j * kConvolvedChannels + i] = static_cast<float>(c.weight[(channel + i) * c.taps + j]);
  int64_t sequence = c.sequences.of(row), position = row - c.sequences.starts[sequence];
  for (bool is_first = true; row < end; ++row, ++position, is_first = false) {
    if (row == c.sequences.starts[sequence + 1]) {
      sequence = c.sequences.of(row);
      position = 0;
    }
    if (position < old && (is_first || position == 0)) {
      const T* state = c.states + c.sequences.block(sequence) * c.state_stride + channel * old;
      const bool is_new = c.sequences.is_new(sequence);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < old; ++j) past[j * kConvolvedChannels + i] = is_new ? T(0) : state[i * old + j];
    }
    for (int64_t j = 0; j < c.taps; ++j)
      inputs[j] = position + j < old ? past.data() + (position + j) * kConvolvedChannels
                                     : c.x + (row + j - old) * c.x_stride + channel;
    for_each_vector(count, [&](int64_t i, int64_t n) {
      Vec sum = c.bias == nullptr ? Vec(0) : widen(c.bias + channel + i, n);
      for (int64_t j = 0; j < c.taps; ++j)
        sum = at::vec::fmadd(Vec::loadu(&weights[j * kConvolvedChannels + i]), widen(inputs[j] + i, n), sum);
      store(c.out + row * c.channels + channel + i, c.silu ? activate<Activation::kSilu>(sum) : sum, n);
    });
  }
}

// Replaces a sequence's state, for `count` channels from `channel` on.
template <typename T, typename W>
void keep_inputs(const Convolution<T, W>& c, int64_t sequence, int64_t channel, int64_t count) {
  const int64_t old = c.taps - 1, tokens = c.sequences.tokens(sequence);
  if (tokens == 0) return;
  const bool is_new = c.sequences.is_new(sequence);
  T* state = c.states + c.sequences.block(sequence) * c.state_stride + channel * old;
  const T* x = c.x + c.sequences.starts[sequence] * c.x_stride + channel;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < old; ++j) {
      const int64_t position = tokens - old + j;  // in this step; negative: before
      state[i * old + j] = position >= 0 ? x[position * c.x_stride + i] : is_new ? T(0) : state[i * old + j + tokens];
    }
}

template <typename T, typename W>
void short_convolution(const Convolution<T, W>& c) {
  const int64_t rows = c.sequences.starts[c.sequences.count];
  const int64_t parts = (c.channels + kConvolvedChannels - 1) / kConvolvedChannels;
  const auto for_part = [&](int64_t item, const auto& apply) {
    const int64_t channel = item % parts * kConvolvedChannels;
    apply(item / parts, channel, std::min(kConvolvedChannels, c.channels - channel));
  };
  const int64_t stretches = (rows + kConvolvedRows - 1) / kConvolvedRows;
  const int64_t grain = rows_a_thread(std::min(kConvolvedRows, rows) * kConvolvedChannels);
  parallel_for(stretches * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      for_part(item, [&](int64_t stretch, int64_t channel, int64_t count) {
        convolve(c, stretch * kConvolvedRows, std::min(rows, (stretch + 1) * kConvolvedRows), channel, count);
      });
  });
  parallel_for(c.sequences.count * parts, rows_a_thread(kConvolvedChannels * c.taps), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      for_part(item, [&](int64_t sequence, int64_t channel, int64_t count) {
        keep_inputs(c, sequence, channel, count);
      });
  });
}

}  // namespace pagewire

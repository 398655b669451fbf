// Packed weights: how tensors get into the layout that the kernels read, and single rows out of it.
#pragma once

#include <string>

#include "buffer.h"
#include "common.h"

namespace outrider {

// The layout of packed weights in memory, the same on all instruction sets, the rounding that leads to it, and the
// checksum. To be raised with every change of these: files of packed weights are then made anew.
constexpr int kLayout = 2;

// Element types that a weight can be packed from.
enum class Floats : int { f32, f16, bf16 };

class Weight {
 public:
  // A weight [n, k] of zeros [n, k]. Throws std::invalid_argument when the format cannot hold it.
  Weight(Format format, int64_t n, int64_t k);

  // Rounds floats [n, k]: f32 and bf16 as they are, int8 symmetric with one scale for each output, q8 and q4m per group.
  static Weight from_floats(Format format, Floats type, const void* w, int64_t n, int64_t k);

  // The blocks of a GGUF tensor of type Q4_0, Q4_1 or Q8_0 (`stored`). Into the same format as they are: the same codes,
  // scales and minimums; into another one by rounding what they stand for.
  static Weight from_gguf(Format format, Format stored, const uint8_t* raw, int64_t n, int64_t k);

  WeightView view() const { return {format_, n_, k_, data_.data()}; }
  Format format() const { return format_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t blocks() const { return (n_ + kLanes - 1) / kLanes; }
  int64_t bytes() const { return blocks() * block_bytes(format_, k_); }
  uint8_t* data() const { return data_.data(); }

  // Of all bytes. A change of a single word always changes it, other damage all but surely.
  uint64_t checksum() const;

  // Row `row` as fp32 [k].
  void row(int64_t row, float* out) const;

 private:
  uint8_t* unit(int64_t row, int64_t index) const;
  void put_codes(int64_t row, int64_t group, const uint8_t* codes);
  void codes(int64_t row, int64_t group, uint8_t* out) const;
  void put_scales(int64_t row, int64_t group, uint16_t d, uint16_t m);
  void put_group(int64_t row, int64_t group, const float* w);
  void put_row(int64_t row, const float* w);

  Format format_;
  int64_t n_, k_;
  Buffer data_;
};

Format parse_format(const std::string& name);  // throws std::invalid_argument
const char* format_name(Format format);
// Bytes of one group of 32 in a GGUF file.
int64_t gguf_group_bytes(Format format);

}  // namespace outrider

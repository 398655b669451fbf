#include "weight.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace outrider {
namespace {

constexpr const char* kNames[kFormats] = {"f32", "bf16", "int8", "q8_0", "q4_0", "q4_1"};

bool in_nibbles(Format f) { return f == Format::q4 || f == Format::q4m; }

// Where the scales of a group start.
int64_t scales_at(Format f) { return f == Format::q8 ? 512 : 256; }

// Where the code of (lane, input i of the group) lies. Eight-bit: [i / 4][lane][i % 4]. Nibbles: the same for inputs
// 0-3, 8-11, 16-19, 24-27 in the low halves, and four inputs further on in the high halves.
int64_t code_at(Format f, int64_t lane, int64_t i) {
  return in_nibbles(f) ? i / 8 * 64 + lane * 4 + i % 4 : i / 4 * 64 + lane * 4 + i % 4;
}

uint16_t load16(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

void store16(uint8_t* p, uint16_t h) { std::memcpy(p, &h, 2); }

uint16_t checked_half(float f) {
  if (!(std::fabs(f) < 65504.0f)) throw std::invalid_argument("a weight is too large for fp16 scales, or not finite");
  return to_half(f);
}

}  // namespace

Format parse_format(const std::string& name) {
  for (int f = 0; f < kFormats; f++)
    if (name == kNames[f]) return static_cast<Format>(f);
  throw std::invalid_argument("format is '" + name + "'; allowed are f32, bf16, int8, q8_0, q4_0 and q4_1");
}

const char* format_name(Format format) { return kNames[static_cast<int>(format)]; }

int64_t gguf_group_bytes(Format f) {
  switch (f) {
    case Format::q8: return 34;
    case Format::q4: return 18;
    case Format::q4m: return 20;
    default: throw std::invalid_argument(std::string("no GGUF blocks of format ") + format_name(f) + "; allowed are q8_0, q4_0 and q4_1");
  }
}

Weight::Weight(Format format, int64_t n, int64_t k) : format_(format), n_(n), k_(k) {
  if (n < 1 || k < 1 || n > (int64_t{1} << 31) || k > (int64_t{1} << 24))
    throw std::invalid_argument("a weight of shape [" + std::to_string(n) + ", " + std::to_string(k) + "]; both must be positive");
  if (!is_dense(format) && k % kGroup)
    throw std::invalid_argument(std::string("format ") + format_name(format) + " needs inputs in groups of 32; the weight has " +
                                std::to_string(k) + " inputs (f32 and bf16 take any number)");
  data_.grow(bytes());
}

// The group (dense: the input) `index` in the block of `row`.
uint8_t* Weight::unit(int64_t row, int64_t index) const {
  return data_.data() + row / kLanes * block_bytes(format_, k_) + index * unit_bytes(format_);
}

void Weight::put_code(int64_t row, int64_t i, uint8_t code) {
  uint8_t* p = unit(row, i / kGroup) + code_at(format_, row % kLanes, i % kGroup);
  if (!in_nibbles(format_)) {
    *p = code;
  } else {
    *p = static_cast<uint8_t>(i % 8 < 4 ? (*p & 0xf0) | code : (*p & 0x0f) | code << 4);
  }
}

uint8_t Weight::code(int64_t row, int64_t i) const {
  const uint8_t byte = unit(row, i / kGroup)[code_at(format_, row % kLanes, i % kGroup)];
  return !in_nibbles(format_) ? byte : static_cast<uint8_t>(i % 8 < 4 ? byte & 15 : byte >> 4);
}

void Weight::put_scales(int64_t row, int64_t group, uint16_t d, uint16_t m) {
  uint8_t* p = unit(row, group) + scales_at(format_) + row % kLanes * 2;
  store16(p, d);
  if (format_ == Format::q4m) store16(p + 32, m);
}

// Rounds one group, as GGUF's own quantization does.
void Weight::put_group(int64_t row, int64_t group, const float* w) {
  float low = w[0], high = w[0];
  for (int i = 1; i < kGroup; i++) low = std::fmin(low, w[i]), high = std::fmax(high, w[i]);
  const bool minimum = format_ == Format::q4m;
  const float exact = minimum ? (high - low) / 15.0f : std::fmax(std::fabs(low), std::fabs(high)) / 127.0f;
  const uint16_t d = checked_half(exact), m = checked_half(minimum ? low : 0.0f);
  const float inverse = exact > 0.0f ? 1.0f / exact : 0.0f;
  put_scales(row, group, d, m);
  for (int i = 0; i < kGroup; i++) {
    if (!std::isfinite(w[i])) checked_half(w[i]);
    const float scaled = std::isfinite(inverse) ? (w[i] - (minimum ? low : 0.0f)) * inverse : 0.0f;
    const long code = std::lrintf(scaled) + (minimum ? 0 : 128);
    const long most = minimum ? 15 : 255;
    put_code(row, group * kGroup + i, static_cast<uint8_t>(code < 0 ? 0 : code > most ? most : code));
  }
}

Weight Weight::from_floats(Format format, const float* w, int64_t n, int64_t k) {
  if (format == Format::q4) throw std::invalid_argument("q4_0 is read from GGUF only; allowed are f32, bf16, int8, q8_0 and q4_1");
  Weight packed(format, n, k);
  for (int64_t r = 0; r < n; r++, w += k) {
    if (is_dense(format)) {
      for (int64_t i = 0; i < k; i++) {
        uint8_t* p = packed.unit(r, i);
        if (format == Format::f32) {
          std::memcpy(p + r % kLanes * 4, w + i, 4);
        } else {
          store16(p + r % kLanes * 2, to_bf16(w[i]));
        }
      }
    } else if (format == Format::i8) {
      float largest = 0.0f;
      for (int64_t i = 0; i < k; i++) {
        if (!std::isfinite(w[i])) throw std::invalid_argument("a weight is not finite");
        largest = std::fmax(largest, std::fabs(w[i]));
      }
      const float scale = largest / 127.0f, divisor = std::fmax(scale, 0x1p-126f);
      for (int64_t i = 0; i < k; i++) packed.put_code(r, i, static_cast<uint8_t>(std::lrintf(w[i] / divisor) + 128));
      std::memcpy(packed.unit(r, k / kGroup) + r % kLanes * 4, &scale, 4);
    } else {
      for (int64_t g = 0; g < k / kGroup; g++) packed.put_group(r, g, w + g * kGroup);
    }
  }
  return packed;
}

Weight Weight::from_gguf(Format format, const uint8_t* raw, int64_t n, int64_t k) {
  const int64_t bytes = gguf_group_bytes(format);
  Weight packed(format, n, k);
  for (int64_t r = 0; r < n; r++)
    for (int64_t g = 0; g < k / kGroup; g++, raw += bytes) {
      packed.put_scales(r, g, load16(raw), format == Format::q4m ? load16(raw + 2) : 0);
      const uint8_t* codes = raw + (format == Format::q4m ? 4 : 2);
      for (int i = 0; i < kGroup; i++) {
        const int code = format == Format::q8 ? codes[i] ^ 0x80 : i < 16 ? codes[i] & 15 : codes[i - 16] >> 4;
        packed.put_code(r, g * kGroup + i, static_cast<uint8_t>(code));
      }
    }
  return packed;
}

void Weight::row(int64_t row, float* out) const {
  const int64_t lane = row % kLanes;
  if (is_dense(format_)) {
    for (int64_t i = 0; i < k_; i++) {
      const uint8_t* p = unit(row, i);
      if (format_ == Format::f32) {
        std::memcpy(out + i, p + lane * 4, 4);
      } else {
        out[i] = from_bf16(load16(p + lane * 2));
      }
    }
    return;
  }
  float scale = 0.0f;
  if (format_ == Format::i8) std::memcpy(&scale, unit(row, k_ / kGroup) + lane * 4, 4);
  const int offset = format_ == Format::q4m ? 0 : format_ == Format::q4 ? 8 : 128;
  for (int64_t g = 0; g < k_ / kGroup; g++) {
    const uint8_t* p = unit(row, g) + scales_at(format_) + lane * 2;
    if (format_ != Format::i8) scale = from_half(load16(p));
    const float least = format_ == Format::q4m ? from_half(load16(p + 32)) : 0.0f;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; i++) out[i] = static_cast<float>(code(row, i) - offset) * scale + least;
  }
}

}  // namespace outrider

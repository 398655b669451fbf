#include "weight.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "half.h"

namespace outrider {
namespace {

constexpr const char* kNames[kFormats] = {"f32", "bf16", "int8", "q8_0", "q4_0", "q4_1"};

bool in_nibbles(Format f) { return f == Format::q4 || f == Format::q4m; }

// Where the scales of a group start.
int64_t scales_at(Format f) { return f == Format::q8 ? 512 : 256; }

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

// Codes, scale and minimum of one group of a GGUF file.
struct Group {
  float d, m;
  uint8_t codes[kGroup];  // unsigned, as we keep them
};

Group read_group(Format stored, const uint8_t* raw) {
  Group g;
  g.d = from_half(load16(raw));
  g.m = stored == Format::q4m ? from_half(load16(raw + 2)) : 0.0f;
  const uint8_t* codes = raw + (stored == Format::q4m ? 4 : 2);
  for (int i = 0; i < kGroup / 2; i++) {
    g.codes[i] = static_cast<uint8_t>(stored == Format::q8 ? codes[i] ^ 0x80 : codes[i] & 15);
    g.codes[i + 16] = static_cast<uint8_t>(stored == Format::q8 ? codes[i + 16] ^ 0x80 : codes[i] >> 4);
  }
  return g;
}

// What stands for zero.
int offset(Format f) { return f == Format::q4m ? 0 : f == Format::q4 ? 8 : 128; }

void to_floats(Floats type, const void* from, int64_t at, int64_t k, float* to) {
  if (type == Floats::f32) {
    std::memcpy(to, static_cast<const float*>(from) + at, static_cast<size_t>(k) * 4);
    return;
  }
  const uint16_t* half = static_cast<const uint16_t*>(from) + at;
  for (int64_t i = 0; i < k; i++) to[i] = type == Floats::f16 ? from_half(half[i]) : from_bf16(half[i]);
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

// Codes lie [input / 4][lane][input % 4]. Nibbles: the same for inputs 0-3, 8-11, 16-19, 24-27 in the low halves, and four
// inputs further on in the high halves.
void Weight::put_codes(int64_t row, int64_t group, const uint8_t* codes) {
  uint8_t* p = unit(row, group) + row % kLanes * 4;
  if (!in_nibbles(format_)) {
    for (int i = 0; i < kGroup; i += 4) std::memcpy(p + i * kLanes, codes + i, 4);
    return;
  }
  for (int i = 0; i < kGroup; i += 8)
    for (int j = 0; j < 4; j++) p[i / 2 * kLanes + j] = static_cast<uint8_t>(codes[i + j] | codes[i + 4 + j] << 4);
}

void Weight::codes(int64_t row, int64_t group, uint8_t* out) const {
  const uint8_t* p = unit(row, group) + row % kLanes * 4;
  if (!in_nibbles(format_)) {
    for (int i = 0; i < kGroup; i += 4) std::memcpy(out + i, p + i * kLanes, 4);
    return;
  }
  for (int i = 0; i < kGroup; i += 8)
    for (int j = 0; j < 4; j++) {
      const uint8_t byte = p[i / 2 * kLanes + j];
      out[i + j] = byte & 15;
      out[i + 4 + j] = byte >> 4;
    }
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
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; i++) {
    if (!std::isfinite(w[i])) checked_half(w[i]);
    const float scaled = std::isfinite(inverse) ? (w[i] - (minimum ? low : 0.0f)) * inverse : 0.0f;
    const long code = std::lrintf(scaled) + (minimum ? 0 : 128);
    const long most = minimum ? 15 : 255;
    codes[i] = static_cast<uint8_t>(code < 0 ? 0 : code > most ? most : code);
  }
  put_codes(row, group, codes);
}

void Weight::put_row(int64_t row, const float* w) {
  if (is_dense(format_)) {
    for (int64_t i = 0; i < k_; i++) {
      uint8_t* p = unit(row, i);
      if (format_ == Format::f32) {
        std::memcpy(p + row % kLanes * 4, w + i, 4);
      } else {
        store16(p + row % kLanes * 2, to_bf16(w[i]));
      }
    }
    return;
  }
  if (format_ != Format::i8) {
    for (int64_t g = 0; g < k_ / kGroup; g++) put_group(row, g, w + g * kGroup);
    return;
  }
  float largest = 0.0f;
  for (int64_t i = 0; i < k_; i++) {
    if (!std::isfinite(w[i])) throw std::invalid_argument("a weight is not finite");
    largest = std::fmax(largest, std::fabs(w[i]));
  }
  const float scale = largest / 127.0f, divisor = std::fmax(scale, 0x1p-126f);
  for (int64_t g = 0; g < k_ / kGroup; g++, w += kGroup) {
    uint8_t codes[kGroup];
    for (int i = 0; i < kGroup; i++) codes[i] = static_cast<uint8_t>(std::lrintf(w[i] / divisor) + 128);
    put_codes(row, g, codes);
  }
  std::memcpy(unit(row, k_ / kGroup) + row % kLanes * 4, &scale, 4);
}

Weight Weight::from_floats(Format format, Floats type, const void* w, int64_t n, int64_t k) {
  if (format == Format::q4) throw std::invalid_argument("q4_0 is read from GGUF only; allowed are f32, bf16, int8, q8_0 and q4_1");
  Weight packed(format, n, k);
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < n; r++) {
    to_floats(type, w, r * k, k, row.data());
    packed.put_row(r, row.data());
  }
  return packed;
}

Weight Weight::from_gguf(Format format, Format stored, const uint8_t* raw, int64_t n, int64_t k) {
  const int64_t bytes = gguf_group_bytes(stored);
  if (format == Format::q4 && stored != format) throw std::invalid_argument("only Q4_0 blocks can be packed as q4_0");
  Weight packed(format, n, k);
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < n; r++) {
    for (int64_t g = 0; g < k / kGroup; g++, raw += bytes) {
      const Group group = read_group(stored, raw);
      if (format == stored) {
        packed.put_scales(r, g, load16(raw), stored == Format::q4m ? load16(raw + 2) : 0);
        packed.put_codes(r, g, group.codes);
      } else {
        for (int i = 0; i < kGroup; i++)
          row[static_cast<size_t>(g * kGroup + i)] = static_cast<float>(group.codes[i] - offset(stored)) * group.d + group.m;
      }
    }
    if (format != stored) packed.put_row(r, row.data());
  }
  return packed;
}

uint64_t Weight::checksum() const {
  constexpr int kChains = 8;  // side by side, as a product must wait for the one before it
  uint64_t chain[kChains] = {}, all = 0;
  const auto mix = [](uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;  // odd: each step can be undone, so that no difference is ever lost
    return h << 29 | h >> 35;
  };
  const uint8_t *p = data(), *end = p + bytes();  // a multiple of 32 bytes
  uint64_t words[kChains], rest[kChains] = {};
  for (; p + sizeof(words) <= end; p += sizeof(words)) {
    std::memcpy(words, p, sizeof(words));
    for (int i = 0; i < kChains; i++) chain[i] = mix(chain[i], words[i]);
  }
  std::memcpy(rest, p, static_cast<size_t>(end - p));
  for (int i = 0; i < kChains; i++) all = mix(all, mix(chain[i], rest[i]));
  return all;
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
  for (int64_t g = 0; g < k_ / kGroup; g++) {
    const uint8_t* p = unit(row, g) + scales_at(format_) + lane * 2;
    if (format_ != Format::i8) scale = from_half(load16(p));
    const float least = format_ == Format::q4m ? from_half(load16(p + 32)) : 0.0f;
    uint8_t held[kGroup];
    codes(row, g, held);
    for (int i = 0; i < kGroup; i++) *out++ = static_cast<float>(held[i] - offset(format_)) * scale + least;
  }
}

}  // namespace outrider

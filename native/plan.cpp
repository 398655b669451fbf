#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace outrider {
namespace {

constexpr int64_t kTileRows = 12;  // rows that share keys and values in the cache

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("batch: ") + what);
}

}  // namespace

Plan::Plan(const BatchView& b)
    : slots_(b.slots, b.slots + b.rows),
      positions_(b.positions, b.positions + b.rows),
      cu_rows_(b.cu_rows),
      kv_len_(b.kv_len),
      tail_start_(b.tail_start),
      width_(b.ancestors ? b.words : 0) {
  const auto n_seqs = static_cast<size_t>(b.seqs);
  require(b.block_size > 0, "block_size must be positive");
  require(kv_len_.size() == n_seqs && tail_start_.size() == n_seqs && cu_rows_.size() == n_seqs + 1,
          "kv_len, tail_start, cu_rows and block_tables differ in the number of sequences");
  require(cu_rows_.front() == 0 && cu_rows_.back() == b.rows, "cu_rows must run from 0 to the number of rows");
  for (int64_t slot : slots_) {
    require(slot >= 0 && slot < INT32_MAX, "a slot is out of range");
    max_slot_ = std::max(max_slot_, slot);
  }
  if (b.ancestors) words_.assign(b.ancestors, b.ancestors + b.rows * b.words);
  for (size_t s = 0; s < n_seqs; s++) {
    const int64_t rows = cu_rows_[s + 1] - cu_rows_[s], length = kv_len_[s];
    require(rows >= 0 && length >= rows && length > 0, "kv_len must be at least a sequence's rows");
    require(length <= b.table_width * b.block_size, "kv_len is more than the block table holds");
    if (b.ancestors) {
      require(tail_start_[s] >= 0 && tail_start_[s] <= length, "tail_start must lie within kv_len");
    }
    std::vector<int32_t> list(static_cast<size_t>(length));
    const int64_t* table = b.block_tables + static_cast<int64_t>(s) * b.table_width;
    for (int64_t start = 0; start < length; start += b.block_size, table++) {
      require(*table >= 0 && *table < INT32_MAX / b.block_size, "a block is out of range");
      const int64_t first = *table * b.block_size, end = std::min(start + b.block_size, length);
      for (int64_t i = start; i < end; i++) list[static_cast<size_t>(i)] = static_cast<int32_t>(first + i - start);
      max_slot_ = std::max(max_slot_, first + end - start - 1);
    }
    lists_.push_back(std::move(list));
  }
}

const Plan::Seen& Plan::seen(int64_t window) {
  const auto found = seen_.find(window);
  if (found != seen_.end()) return found->second;
  Seen made;
  for (size_t s = 0; s < lists_.size(); s++) {
    const std::vector<int32_t>& list = lists_[s];
    const int64_t rows = cu_rows_[s + 1] - cu_rows_[s];
    for (int64_t r = 0; r < rows; r++) {
      const int64_t row = cu_rows_[s] + r, own = kv_len_[s] - rows + r;
      // The first position in the window. Before the tail, position and slot are the same.
      const int64_t from = window ? std::max<int64_t>(0, positions_[static_cast<size_t>(row)] - window + 1) : 0;
      if (!width_ || own < tail_start_[s]) {
        made.rows.push_back({list.data(), std::min(from, own + 1), own + 1});
      } else {
        std::vector<int32_t> mine(list.begin(), list.begin() + tail_start_[s]);  // an ancestor's place is its depth
        const int64_t* words = words_.data() + row * width_;
        for (int64_t i = tail_start_[s], bit = 0; i <= own && bit < 64 * width_; i++, bit++) {
          const bool ancestor = static_cast<uint64_t>(words[bit / 64]) >> (bit % 64) & 1;
          if (ancestor) mine.push_back(list[static_cast<size_t>(i)]);
        }
        made.own.push_back(std::move(mine));
        made.rows.push_back({made.own.back().data(), from, static_cast<int64_t>(made.own.back().size())});
      }
      if (made.rows.back().begin >= made.rows.back().end) throw std::invalid_argument("batch: a row sees no slot at all");
    }
  }
  for (size_t s = 0; s < lists_.size(); s++)
    for (int64_t row = cu_rows_[s]; row < cu_rows_[s + 1]; row += kPanel) {
      const Tiles cut(std::min(kPanel, cu_rows_[s + 1] - row), kTileRows);
      for (int64_t t = 0; t < cut.count; t++) made.tiles.push_back(tile(made, static_cast<int64_t>(s), row + cut.start(t), cut.size(t)));
    }
  return seen_.emplace(window, std::move(made)).first->second;
}

RowTile Plan::tile(const Seen& seen, int64_t seq, int64_t first, int64_t count) const {
  RowTile tile = {first, count, INT64_MAX, 0, 0};
  bool one_list = true;
  for (int64_t r = first; r < first + count; r++) {
    const SeenRow& row = seen.rows[static_cast<size_t>(r)];
    tile.from = std::min(tile.from, row.first_stretch());
    tile.to = std::max(tile.to, row.end_stretch());
    one_list = one_list && row.list == seen.rows[static_cast<size_t>(first)].list;
  }
  tile.common = one_list ? tile.to : tail_start_[static_cast<size_t>(seq)] / kStretch;
  return tile;
}

}  // namespace outrider

// Rows of packed weights as float32, so that a tied output layer also serves as the embedding.
#include <vector>

#include "linear_int.h"
#include "ops.h"
#include "ranks.h"

namespace quire {
namespace {

template <class T>
T at(const char* p, int64_t i) {
  T value;
  std::memcpy(&value, p + i * sizeof(T), sizeof(T));
  return value;
}

// Column j of one group: scale * (q - offset) - minimum; a zero point is converted to a minimum.
void unpack_group(const Packed& w, const char* step, int64_t j, float* out, int64_t count) {
  const int64_t values = bytes_of_values(w.format, w.group);
  const float scale =
      is_words(w.format) ? at<float>(step + values, j) : to_float(at<f16>(step + values, j));
  float minimum = has_second(w.format) ? to_float(at<f16>(step + values, NR + j)) : 0.0f;
  if (has_zeros(w.format)) minimum *= scale;
  for (int64_t i = 0; i < count; i++) {
    float q;
    if (w.format == kFloat8) {
      q = float8_of(at<uint8_t>(step, word_byte(w.format, j, i)));
    } else if (w.format == kTable4) {
      const uint8_t both = at<uint8_t>(step, word_byte(w.format, j, i));
      const int code = i % 8 < 4 ? both & 15 : both >> 4;
      q = static_cast<int16_t>(w.table[code] | w.table[16 + code] << 8);
    } else if (is_int8(w.format)) {
      const uint8_t byte = at<uint8_t>(step, (i / kInt8Unit * NR + j) * kInt8Unit + i % kInt8Unit);
      q = kInt8Offset ? byte - kInt8Offset : static_cast<int8_t>(byte);
    } else {
      const uint8_t both = at<uint8_t>(step, i / 8 * NR * 4 + j * 4 + i % 4);
      const int code = i % 8 < 4 ? both & 15 : both >> 4;
      q = w.format == kInt4Float ? kDoubled[code] : code - offset_of(w.format);
    }
    out[i] = scale * q - minimum;
  }
}

// Restores the order of x in a row of sorted values.
void unsort(float* row, const int32_t* order, int64_t k) {
  const std::vector<float> sorted(row, row + k);
  for (int64_t i = 0; i < k; i++) row[order[i]] = sorted[i];
}

void unpack_row(const Packed& w, int64_t row, float* out) {
  const char* panel = w.panel(row / NR);
  const int64_t j = row % NR;
  for (int64_t s = 0; s < w.steps; s++, panel += w.step_bytes) {
    const int64_t k = s * w.step_k, count = std::min(w.step_k, w.k - k);
    if (w.format == kFloat) out[k] = at<float>(panel, j);
    if (w.format == kHalf) out[k] = to_float(at<f16>(panel, j));
    for (int64_t i = 0; w.format == kBrain && i < count; i++)
      out[k + i] = to_float(at<bf16>(panel, 2 * j + i));
    if (w.format >= kInt8) unpack_group(w, panel, j, out + k, count);
  }
}

void unpack(const Packed& w, float* out, int64_t row) {
  unpack_row(w, row, out);
  if (w.order) unsort(out, w.order, w.k);
}

// Gets each row from the rank that has it.
int unpack_sharded_rows(const Packed& w, float* out, const int64_t* ids, int64_t count,
                        int threads) {
  const Shard& shard = *w.shard;
  RankGroup& group = *shard.group;
  const int64_t first = shard.outputs[group.rank()], most = group.slot_floats() / w.k;
  if (most < 1) return kNoMemory;
  for (int64_t from = 0; from < count; from += most) {
    const int64_t rows = std::min(most, count - from);
    float* slot = group.slot();
    deal_ranges(worth(threads, rows * w.k, 4096), rows, 1, [&](int64_t low, int64_t high) {
      for (int64_t i = low; i < high; i++) {
        const int64_t row = ids[from + i] - first;
        if (row >= 0 && row < w.n) unpack(w, slot + i * w.k, row);
      }
    });
    if (const int wrong = group.arrive(rows * w.k)) return wrong;
    for (int64_t i = 0; i < rows; i++) {
      int owner = 0;
      while (ids[from + i] >= shard.outputs[owner + 1]) owner++;
      std::memcpy(out + (from + i) * w.k, group.slot(owner) + i * w.k, w.k * sizeof(float));
    }
    group.advance();
  }
  return kOk;
}

}  // namespace

int64_t Packed::outputs() const { return shard ? shard->outputs.back() : n; }

int unpack_rows(const Packed& w, float* out, const int64_t* ids, int64_t count, int threads) {
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= w.outputs()) return kBadRow;
  }
  if (w.shard) return unpack_sharded_rows(w, out, ids, count, threads);
  deal_ranges(worth(threads, count * w.k, 4096), count, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) unpack(w, out + i * w.k, ids[i]);
  });
  return kOk;
}

}  // namespace quire

// out [count, k] float32: the rows `ids` of W.
extern "C" int quire_linear_rows(const void* packed, float* out, const int64_t* ids, int64_t count,
                                 int threads) {
  return unpack_rows(*static_cast<const Packed*>(packed), out, ids, count, threads);
}

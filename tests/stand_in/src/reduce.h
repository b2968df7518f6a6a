// Sums, products and the like of numbers as NCCL's types have them.
#pragma once

#include "nccl_api.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace stand_in {

inline std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

inline float from_bfloat16(std::uint16_t bits) {
  const std::uint32_t whole = std::uint32_t{bits} << 16;
  float found;
  std::memcpy(&found, &whole, 4);
  return found;
}

inline std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

// Floats of eight bits; `mantissa` is 3 (e4m3, without infinities) or 2 (e5m2).
inline float from_float8(std::uint8_t bits, int mantissa) {
  const int exponent_bits = 7 - mantissa, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7F) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
  const float sign = bits & 0x80 ? -1.f : 1.f;
  if (mantissa == 3 ? (bits & 0x7F) == 0x7F : exponent == 31) {
    return mantissa == 2 && !fraction ? sign * INFINITY : NAN;
  }
  const float scale = static_cast<float>(1 << mantissa);
  if (!exponent) return sign * std::ldexp(static_cast<float>(fraction) / scale, 1 - bias);
  return sign * std::ldexp(1 + static_cast<float>(fraction) / scale, exponent - bias);
}

inline std::uint8_t to_float8(float value, int mantissa) {
  std::uint8_t best = 0;
  float nearest = INFINITY;
  if (std::isnan(value)) return 0x7F;
  for (int bits = 0; bits < 256; ++bits) {  // slow, and rare
    const float candidate = from_float8(static_cast<std::uint8_t>(bits), mantissa);
    const float distance = std::fabs(candidate - value);
    if (distance < nearest || (distance == nearest && !(bits & 1))) nearest = distance, best = static_cast<std::uint8_t>(bits);
  }
  return best;
}

struct Reduction {
  ncclRedOp_t kind = ncclSum;
  double factor = 1;  // that every input is multiplied by first
};

template <typename Value>
void combine(std::vector<Value>& into, const std::vector<Value>& other, ncclRedOp_t kind) {
  for (std::size_t index = 0; index < into.size(); ++index) {
    switch (kind) {
      case ncclProd: into[index] = static_cast<Value>(into[index] * other[index]); break;
      case ncclMax: into[index] = std::max(into[index], other[index]); break;
      case ncclMin: into[index] = std::min(into[index], other[index]); break;
      default: into[index] = static_cast<Value>(into[index] + other[index]);
    }
  }
}

// Reduces `inputs`, one per rank and all of `count` elements, into `output`.
template <typename Stored, typename Value, typename Load, typename Store>
void reduce_as(const std::vector<std::vector<char>>& inputs, char* output, std::size_t count, const Reduction& reduction,
               Load load, Store store) {
  std::vector<Value> total(count), other(count);
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    auto& target = rank ? other : total;
    for (std::size_t index = 0; index < count; ++index) {
      Stored stored;
      std::memcpy(&stored, inputs[rank].data() + index * sizeof(Stored), sizeof(Stored));
      target[index] = load(stored);
      if (reduction.factor != 1) target[index] = static_cast<Value>(target[index] * reduction.factor);
    }
    if (rank) combine(total, other, reduction.kind);
  }
  for (std::size_t index = 0; index < count; ++index) {
    Value value = total[index];
    if (reduction.kind == ncclAvg) value = static_cast<Value>(value / static_cast<Value>(inputs.size()));
    const Stored stored = store(value);
    std::memcpy(output + index * sizeof(Stored), &stored, sizeof(Stored));
  }
}

inline void reduce(const std::vector<std::vector<char>>& inputs, char* output, std::size_t count, ncclDataType_t type,
                   const Reduction& reduction) {
  const auto plain = [&](auto example) {
    using Value = decltype(example);
    const auto same = [](Value value) { return value; };
    reduce_as<Value, Value>(inputs, output, count, reduction, same, same);
  };
  switch (type) {
    case ncclInt8: return plain(std::int8_t{});
    case ncclUint8: return plain(std::uint8_t{});
    case ncclInt32: return plain(std::int32_t{});
    case ncclUint32: return plain(std::uint32_t{});
    case ncclInt64: return plain(std::int64_t{});
    case ncclUint64: return plain(std::uint64_t{});
    case ncclFloat32: return plain(float{});
    case ncclFloat64: return plain(double{});
    case ncclFloat16:
      return reduce_as<_Float16, float>(
          inputs, output, count, reduction, [](_Float16 value) { return static_cast<float>(value); },
          [](float value) { return static_cast<_Float16>(value); });
    case ncclBfloat16:
      return reduce_as<std::uint16_t, float>(inputs, output, count, reduction, from_bfloat16, to_bfloat16);
    default: {
      const int mantissa = type == ncclFloat8e4m3 ? 3 : 2;
      return reduce_as<std::uint8_t, float>(
          inputs, output, count, reduction, [=](std::uint8_t bits) { return from_float8(bits, mantissa); },
          [=](float value) { return to_float8(value, mantissa); });
    }
  }
}

}  // namespace stand_in

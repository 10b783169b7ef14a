// A small map from streams to values whose order of iteration is part of the allocator's
// behaviour: when several streams are ready at once, the order in which their frees complete
// decides which blocks merge first. The reference walks a hash table; this one puts streams in
// the same order.
//
// Open addressing over a power-of-two number of slots, at most half full. A stream's home slot
// comes from a multiplicative (Fibonacci) hash. A newcomer that is further from its home than a
// resident takes the resident's slot, and the resident moves on; removal shifts the followers
// back. A stream that would be kLookups slots from home makes the table grow.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "driver/driver.h"

namespace mybackend::caching {

template <class Value>
class StreamTable {
 public:
  // `device` enters the hash.
  explicit StreamTable(int device) : device_(device) {}

  bool empty() const noexcept { return count_ == 0; }
  std::size_t size() const noexcept { return count_; }

  // The value of the stream, made if it is not there.
  Value& operator[](StreamHandle stream) {
    for (Slot& slot : slots_) {
      if (slot.distance >= 0 && slot.stream == stream) return slot.value;
    }
    insert(stream, Value());
    for (Slot& slot : slots_) {
      if (slot.distance >= 0 && slot.stream == stream) return slot.value;
    }
    return slots_.front().value;  // not reached
  }

  // visit(stream, value) -> bool: whether the entry stays. In slot order.
  template <class Visit>
  void for_each(Visit visit) {
    for (std::size_t i = 0; i < slots_.size();) {
      if (slots_[i].distance < 0 || visit(slots_[i].stream, slots_[i].value))
        ++i;
      else
        erase_at(i);
    }
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.distance >= 0) visit(slot.stream, slot.value);
    }
  }

 private:
  struct Slot {
    int distance = -1;  // from home; -1: free
    StreamHandle stream = 0;
    Value value{};
  };

  std::size_t bucket_count() const noexcept { return buckets_; }
  int lookups() const noexcept { return std::max(4, static_cast<int>(std::bit_width(buckets_)) - 1); }

  std::size_t home(StreamHandle stream) const noexcept {
    constexpr std::uint64_t kCudaDeviceType = 1;
    const std::uint64_t bits =
        (kCudaDeviceType << 56) | (static_cast<std::uint64_t>(device_) << 48) | (stream & ((std::uint64_t{1} << 48) - 1));
    return static_cast<std::size_t>((bits * 11400714819323198485ull) >> (64 - (std::bit_width(buckets_) - 1)));
  }

  void grow() {
    std::vector<Slot> old = std::move(slots_);
    buckets_ = std::max<std::size_t>(4, 2 * buckets_);
    slots_.clear();
    slots_.resize(buckets_ + static_cast<std::size_t>(lookups()));
    count_ = 0;
    for (Slot& slot : old) {
      if (slot.distance >= 0) insert(slot.stream, std::move(slot.value));
    }
  }

  void insert(StreamHandle stream, Value value) {
    if (buckets_ == 0 || (count_ + 1) * 2 > buckets_) {
      grow();
      return insert(stream, std::move(value));
    }
    Slot incoming{0, stream, std::move(value)};
    for (std::size_t i = home(stream);; ++i, ++incoming.distance) {
      if (incoming.distance == lookups()) {
        grow();
        return insert(incoming.stream, std::move(incoming.value));
      }
      if (slots_[i].distance < 0) {
        slots_[i] = std::move(incoming);
        ++count_;
        return;
      }
      if (slots_[i].distance < incoming.distance) std::swap(slots_[i], incoming);
    }
  }

  void erase_at(std::size_t i) {
    slots_[i] = Slot();
    --count_;
    for (; i + 1 < slots_.size() && slots_[i + 1].distance > 0; ++i) {
      slots_[i] = std::move(slots_[i + 1]);
      --slots_[i].distance;
      slots_[i + 1] = Slot();
    }
  }

  const int device_;
  std::size_t buckets_ = 0;
  std::size_t count_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace mybackend::caching

// A small map whose order of iteration is part of the allocator's behaviour: when several streams
// are ready at once, the order in which their frees complete decides which blocks merge first;
// the order in which pools are emptied decides the driver's. The reference walks hash tables;
// this one puts its keys in the same order.
//
// Open addressing over a power-of-two number of slots, at most half full. A key's home slot comes
// from its hash, multiplied (Fibonacci). A newcomer that is further from its home than a resident
// takes the resident's slot, and the resident moves on; removal shifts the followers back. A key
// that would be lookups() slots from home makes the table grow.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/caching/block.h"
#include "driver/driver.h"

namespace mybackend::caching {

// Hash: key -> 64 bits, the reference's.
template <class Key, class Value, class Hash>
class HashOrderTable {
 public:
  explicit HashOrderTable(Hash hash = Hash()) : hash_(hash) {}

  bool empty() const noexcept { return count_ == 0; }
  std::size_t size() const noexcept { return count_; }
  bool contains(const Key& key) const noexcept {
    return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.distance >= 0 && slot.key == key; });
  }
  void erase(const Key& key) {
    for_each([&](const Key& present, Value&) { return !(present == key); });
  }
  std::vector<Key> keys() const {
    std::vector<Key> result;
    for_each([&](const Key& key, const Value&) { result.push_back(key); });
    return result;
  }

  // The value of the key, made if it is not there.
  Value& operator[](Key key) {
    for (Slot& slot : slots_) {
      if (slot.distance >= 0 && slot.key == key) return slot.value;
    }
    insert(key, Value());
    for (Slot& slot : slots_) {
      if (slot.distance >= 0 && slot.key == key) return slot.value;
    }
    return slots_.front().value;  // not reached
  }

  // visit(key, value) -> bool: whether the entry stays. In slot order.
  template <class Visit>
  void for_each(Visit visit) {
    for (std::size_t i = 0; i < slots_.size();) {
      if (slots_[i].distance < 0 || visit(slots_[i].key, slots_[i].value))
        ++i;
      else
        erase_at(i);
    }
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.distance >= 0) visit(slot.key, slot.value);
    }
  }

 private:
  struct Slot {
    int distance = -1;  // from home; -1: free
    Key key{};
    Value value{};
  };

  std::size_t bucket_count() const noexcept { return buckets_; }
  int lookups() const noexcept { return std::max(4, static_cast<int>(std::bit_width(buckets_)) - 1); }

  std::size_t home(const Key& key) const noexcept {
    return static_cast<std::size_t>((hash_(key) * 11400714819323198485ull) >> (64 - (std::bit_width(buckets_) - 1)));
  }

  void grow() {
    std::vector<Slot> old = std::move(slots_);
    buckets_ = std::max<std::size_t>(4, 2 * buckets_);
    slots_.clear();
    slots_.resize(buckets_ + static_cast<std::size_t>(lookups()));
    count_ = 0;
    for (Slot& slot : old) {
      if (slot.distance >= 0) insert(slot.key, std::move(slot.value));
    }
  }

  void insert(Key key, Value value) {
    if (buckets_ == 0 || (count_ + 1) * 2 > buckets_) {
      grow();
      return insert(key, std::move(value));
    }
    Slot incoming{0, key, std::move(value)};
    for (std::size_t i = home(key);; ++i, ++incoming.distance) {
      if (incoming.distance == lookups()) {
        grow();
        return insert(incoming.key, std::move(incoming.value));
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

  const Hash hash_;
  std::size_t buckets_ = 0;
  std::size_t count_ = 0;
  std::vector<Slot> slots_;
};

struct StreamHash {
  int device;
  std::uint64_t operator()(StreamHandle stream) const noexcept {
    constexpr std::uint64_t kCudaDeviceType = 1;
    return (kCudaDeviceType << 56) | (static_cast<std::uint64_t>(device) << 48) | (stream & ((std::uint64_t{1} << 48) - 1));
  }
};
template <class Value>
using StreamTable = HashOrderTable<StreamHandle, Value, StreamHash>;

struct PoolIdHash {
  std::uint64_t operator()(const PoolId& id) const noexcept { return id.first != 0 ? id.first : id.second; }
};
using PoolIdSet = HashOrderTable<PoolId, char, PoolIdHash>;

}  // namespace mybackend::caching

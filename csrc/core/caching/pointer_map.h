// address -> block of every block that is handed out: open addressing with linear probing,
// at most half full, deletion by shifting back (no tombstones, so it does not age).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mybackend::caching {

struct Block;

class PointerMap {
 public:
  PointerMap() : slots_(kMinCapacity) {}

  void insert(std::uintptr_t address, Block* block) {
    if ((size_ + 1) * 2 > slots_.size()) grow();
    place(address, block);
    ++size_;
  }

  Block* find(std::uintptr_t address) const noexcept {
    for (std::size_t i = home(address); slots_[i].address != 0; i = (i + 1) & mask()) {
      if (slots_[i].address == address) return slots_[i].block;
    }
    return nullptr;
  }

  Block* erase(std::uintptr_t address) noexcept {
    std::size_t i = home(address);
    while (slots_[i].address != address) {
      if (slots_[i].address == 0) return nullptr;
      i = (i + 1) & mask();
    }
    Block* found = slots_[i].block;
    // Move later members of the run into the hole when the hole is on their way from home.
    std::size_t hole = i;
    for (std::size_t j = (i + 1) & mask(); slots_[j].address != 0; j = (j + 1) & mask()) {
      if (((j - home(slots_[j].address)) & mask()) >= ((j - hole) & mask())) {
        slots_[hole] = slots_[j];
        hole = j;
      }
    }
    slots_[hole] = {};
    --size_;
    return found;
  }

  std::size_t size() const noexcept { return size_; }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.address != 0) visit(slot.block);
    }
  }

 private:
  static constexpr std::size_t kMinCapacity = 1024;
  struct Slot {
    std::uintptr_t address = 0;
    Block* block = nullptr;
  };

  std::size_t mask() const noexcept { return slots_.size() - 1; }
  std::size_t home(std::uintptr_t address) const noexcept {
    // Addresses are multiples of 512; a multiplication spreads the rest over the high bits.
    return static_cast<std::size_t>(((address >> 9) * 0x9E3779B97F4A7C15ull) >> 32) & mask();
  }
  void place(std::uintptr_t address, Block* block) noexcept {
    std::size_t i = home(address);
    while (slots_[i].address != 0) i = (i + 1) & mask();
    slots_[i] = {address, block};
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.address != 0) place(slot.address, slot.block);
    }
  }

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

}  // namespace mybackend::caching

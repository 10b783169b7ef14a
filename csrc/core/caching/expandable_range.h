// The address range of an expandable segment, and which of its pages have memory. Pages are
// mapped one physical handle each, so that any single one can be unmapped again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "driver/driver.h"

namespace mybackend::caching {

struct AddressSpan {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
};

class ExpandableRange {
 public:
  // Reserves ceil(1.125 x device memory / page) pages. `page_bytes` is a multiple of the
  // driver's own page.
  static Status create(Driver* driver, int device, std::size_t page_bytes, std::unique_ptr<ExpandableRange>* out);
  ~ExpandableRange();

  // pre: span.address is a page's start and no page of it is mapped. Maps all pages that the
  // span touches, or none.
  Status map(AddressSpan span, AddressSpan* mapped);
  // Unmaps the pages that lie wholly inside the span, after waiting for `stream`. The part
  // that was unmapped (perhaps empty) is *unmapped.
  Status unmap(AddressSpan span, StreamHandle stream, AddressSpan* unmapped);
  // Tries again to give back what the driver refused to take: pages that a failed map() had to
  // leave mapped, memory of unmapped pages.
  void release_idle_pages() noexcept;

  std::uintptr_t address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return pages_.size() * page_bytes_; }
  std::size_t page_bytes() const noexcept { return page_bytes_; }
  // Of pages that blocks stand on.
  std::size_t mapped_page_count() const noexcept { return mapped_page_count_; }

 private:
  ExpandableRange(Driver* driver, int device, std::size_t page_bytes) : driver_(driver), device_(device), page_bytes_(page_bytes) {}
  void* page_address(std::size_t page) const noexcept { return reinterpret_cast<void*>(address_ + page * page_bytes_); }
  Status unmap_page(std::size_t page);
  void release(PhysicalHandle handle) noexcept;

  Driver* const driver_;
  const int device_;
  const std::size_t page_bytes_;
  std::uintptr_t address_ = 0;
  struct Page {
    PhysicalHandle handle = 0;
    bool mapped = false;
    bool idle = false;  // mapped, but by a map() that failed and could not take it back: in no block
  };
  std::vector<Page> pages_;
  std::size_t mapped_page_count_ = 0;
  std::size_t idle_page_count_ = 0;
  std::vector<PhysicalHandle> unreleased_;  // memory without pages
};

}  // namespace mybackend::caching

// Random number generators of the device. Kernels are borrowed, so a generator holds one of the
// lender's (lender.h), which the borrowed kernel draws from; with the same seed, the device and its
// lender produce the same numbers. On a GPU the default generators are torch.cuda's own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "torch/context.h"

namespace mybackend::glue {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;  // not supported where the CPU lends
  std::uint64_t get_offset() const override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type() { return kDeviceType; }
  // A CPU generator until the devices have started; on a GPU, then one of CUDA's with its seed.
  at::Generator& lent() const;

 private:
  DeviceGenerator* clone_impl() const override;
  mutable at::Generator lent_;
  bool is_default_ = false;
  friend std::vector<at::Generator>& default_generators();
};

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// Those of all devices. Starts nothing: before the devices start, of all that there can be.
void seed_default_generators(std::uint64_t seed);

// What a borrowed kernel gets for the generator that the caller gave for `device`.
std::optional<at::Generator> borrowed_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

// For kernels that draw from the lender's default generator without taking one: while it lives, that
// generator has the state of the device's default generator.
class ScopedDefaultGenerator {
 public:
  explicit ScopedDefaultGenerator(c10::DeviceIndex device);
  ~ScopedDefaultGenerator();
  ScopedDefaultGenerator(const ScopedDefaultGenerator&) = delete;
  ScopedDefaultGenerator& operator=(const ScopedDefaultGenerator&) = delete;

 private:
  void swap_states();
  const c10::DeviceIndex device_;
};

}  // namespace mybackend::glue

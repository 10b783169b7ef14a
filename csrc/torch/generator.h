// Random number generators of the device. Kernels are borrowed from the CPU, so a generator
// holds a CPU generator, which the borrowed kernel draws from; with the same seed, device and
// CPU produce the same numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "torch/context.h"

namespace mybackend::glue {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;  // not supported, as on the CPU
  std::uint64_t get_offset() const override;
  std::uint64_t current_seed() const override;
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type() { return kDeviceType; }
  const at::Generator& cpu_generator() const noexcept { return cpu_; }

 private:
  DeviceGenerator* clone_impl() const override;
  at::Generator cpu_;
};

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// What a borrowed kernel gets for the generator that the caller gave for `device`.
std::optional<at::Generator> borrowed_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

// For kernels that draw from the default CPU generator without taking one: while it lives, that
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

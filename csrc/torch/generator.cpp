#include "torch/generator.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <mutex>

#include "torch/lender.h"

namespace mybackend::glue {

DeviceGenerator::DeviceGenerator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      lent_(at::detail::createCPUGenerator()) {}

at::Generator& DeviceGenerator::lent() const {
  if (C10_UNLIKELY(on_gpu() && lent_.device().is_cpu())) {
    const at::CUDAHooksInterface& cuda = at::detail::getCUDAHooks();
    at::Generator gpu = is_default_ ? cuda.getDefaultGenerator(device().index()) : cuda.getNewGenerator(device().index());
    if (const std::uint64_t seed = lent_.current_seed(); seed != c10::default_rng_seed_val) {
      gpu.set_current_seed(seed);
    }
    lent_ = std::move(gpu);
  }
  return lent_;
}

void DeviceGenerator::set_current_seed(std::uint64_t seed) {
  lent().set_current_seed(seed);
}

void DeviceGenerator::set_offset(std::uint64_t offset) {
  TORCH_CHECK_NOT_IMPLEMENTED(on_gpu(), "mybackend generators have no offset: they are Mersenne Twisters, as the CPU's");
  lent().set_offset(offset);
}

std::uint64_t DeviceGenerator::get_offset() const {
  TORCH_CHECK_NOT_IMPLEMENTED(on_gpu(), "mybackend generators have no offset: they are Mersenne Twisters, as the CPU's");
  return lent().get_offset();
}

std::uint64_t DeviceGenerator::current_seed() const {
  return lent().current_seed();
}

std::uint64_t DeviceGenerator::seed() {
  return lent().seed();
}

void DeviceGenerator::set_state(const c10::TensorImpl& new_state) {
  lent().unsafeGetGeneratorImpl()->set_state(new_state);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  return lent().unsafeGetGeneratorImpl()->get_state();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(device().index());
  copy->lent_ = lent().clone();
  return copy;
}

std::vector<at::Generator>& default_generators() {
  static auto* generators = new std::vector<at::Generator>;
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < kMaxDevices; ++i) {
      generators->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
      at::check_generator<DeviceGenerator>(generators->back())->is_default_ = true;
    }
  });
  return *generators;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  check_device_index(device);
  return default_generators()[static_cast<std::size_t>(device)];
}

void seed_default_generators(std::uint64_t seed) {
  const DeviceMemory* memory = Runtime::get().memory_if_started();
  for (int i = 0; i < (memory != nullptr ? memory->device_count() : kMaxDevices); ++i) {
    at::Generator& generator = default_generators()[static_cast<std::size_t>(i)];
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

std::optional<at::Generator> borrowed_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  if (!given.has_value() || !given->defined()) {
    return static_cast<DeviceGenerator*>(default_generator(device).unsafeGetGeneratorImpl())->lent();
  }
  TORCH_CHECK(given->device().type() == kDeviceType, "Expected a '", c10::Device(kDeviceType).str(),
              "' device type for generator but found '", given->device().type(), "'");
  return static_cast<DeviceGenerator*>(given->unsafeGetGeneratorImpl())->lent();
}

ScopedDefaultGenerator::ScopedDefaultGenerator(c10::DeviceIndex device) : device_(device) {
  swap_states();
}
ScopedDefaultGenerator::~ScopedDefaultGenerator() {
  swap_states();
}

void ScopedDefaultGenerator::swap_states() {
  if (on_gpu()) return;  // they are the same
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Generator ours = borrowed_generator(std::nullopt, device_).value();
  std::scoped_lock lock(cpu.mutex(), ours.mutex());
  auto* a = at::check_generator<at::CPUGeneratorImpl>(cpu);
  auto* b = at::check_generator<at::CPUGeneratorImpl>(ours);
  const auto engine = a->engine();
  const auto next_float = a->next_float_normal_sample();
  const auto next_double = a->next_double_normal_sample();
  a->set_engine(b->engine());
  a->set_next_float_normal_sample(b->next_float_normal_sample());
  a->set_next_double_normal_sample(b->next_double_normal_sample());
  b->set_engine(engine);
  b->set_next_float_normal_sample(next_float);
  b->set_next_double_normal_sample(next_double);
}

}  // namespace mybackend::glue

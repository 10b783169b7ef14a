#include "torch/config_hook.h"

#include <c10/core/AllocatorConfig.h>

#include <mutex>
#include <unordered_set>

#include "torch/context.h"

namespace mybackend::glue {

void register_config_hook() {
  static std::once_flag once;
  std::call_once(once, [] {
    using TorchConfig = c10::CachingAllocator::AcceleratorAllocatorConfig;
    std::function<void(const std::string&)> earlier = TorchConfig::getConfigParserHook();
    // torch's parser refuses keys that it was not told of.
    std::unordered_set<std::string> keys;
    for (const ConfigKey& key : config_keys()) {
      if (TorchConfig::getKeys().count(key.name) == 0) keys.insert(key.name);
    }
    TorchConfig::registerDeviceConfigParserHook(
        [earlier = std::move(earlier)](const std::string& text) {
          if (earlier) earlier(text);
          check(Runtime::get().configure(text, "torch settings"));
        },
        keys);
  });
}

}  // namespace mybackend::glue

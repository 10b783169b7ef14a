// Configuration: one table of keys (config_keys.inc), one strict parser.
//
// Settings is a plain value: parse into a copy, use it when all of it was right. Config holds
// the settings in force, with the origin of each value.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/units.h"

namespace mybackend {

// Divisions of each power of two, for requests of 1 MiB, 2 MiB, ... 32 GiB and above.
using Divisions = std::array<std::uint32_t, 16>;

namespace config_kind {
using SizeMb = std::size_t;  // bytes
using Bool = bool;
using Fraction = double;
using OpenFraction = double;
using Integer = std::int64_t;
using PowerOfTwo = std::int64_t;
using Backend = std::string;
using DriverName = std::string;
using Path = std::string;
using Divisions = mybackend::Divisions;
}  // namespace config_kind

struct Settings {
#define MYBACKEND_KEY(name, kind, initial, low, high, group, range, meaning) config_kind::kind name = initial;
#include "core/config_keys.inc"
#undef MYBACKEND_KEY
};

struct ConfigKey {
  const char* name;
  const char* kind;
  const char* group;
  const char* range;
  const char* meaning;
  std::string default_value;  // as it would be written
};

// All keys, in the table's order.
const std::vector<ConfigKey>& config_keys();
// The key with this name or alias, or nullptr.
const ConfigKey* find_config_key(std::string_view name);
// The nearest known name, or an empty string when none is near.
std::string suggest_config_key(std::string_view name);

struct ConfigEntry {
  std::string key;  // canonical name
  std::string value;
  std::size_t position;  // of the key in the parsed text, bytes
};

// Applies `text` ("key:value,key:value", white space ignored) to *settings. On an error
// nothing changes, and the message names the key, its position, the value and the allowed
// form. `entries` (may be null) receives what was set.
Status parse_settings(std::string_view text, Settings* settings, std::vector<ConfigEntry>* entries = nullptr);

// Combinations that defeat each other, in words; empty when there are none.
std::vector<std::string> settings_warnings(const Settings& settings);

// A value as it would be written; an empty string for "unlimited" and "off".
std::string setting_text(const Settings& settings, std::string_view key);
// {"key": value, ...}: sizes in MB, null for unlimited.
std::string settings_json(const Settings& settings);

// What differs in `after`, as it would be written: "key:value,key:value".
std::string settings_difference(const Settings& before, const Settings& after);

class Config {
 public:
  Settings settings() const;
  // Where a value came from: "default", a variable's name, or what set() was told.
  std::string origin(std::string_view key) const;
  Status set(std::string_view text, const std::string& origin);
  void reset();

  // Called with the new settings after each successful set() or reset(), under no lock.
  void on_change(std::function<void(const Settings&)> listener);

 private:
  mutable std::mutex mutex_;
  Settings settings_;
  std::vector<std::pair<std::string, std::string>> origins_;
  std::vector<std::function<void(const Settings&)>> listeners_;
};

// The first of MYBACKEND_ALLOC_CONF, PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF that is set
// and not empty; nullptr when none is.
const char* config_variable_in_force();

}  // namespace mybackend

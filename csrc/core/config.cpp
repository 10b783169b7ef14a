#include "core/config.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>

namespace mybackend {
namespace {

struct Bounds {
  std::int64_t low, high;
};

// --- Text forms of the kinds. parse_* return false when the text is not of the kind's form. --

std::string without_space(std::string_view text) {
  std::string result;
  for (char c : text) {
    if (!std::isspace(static_cast<unsigned char>(c))) result += c;
  }
  return result;
}

bool parse_integer(std::string_view text, std::int64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_real(std::string_view text, double* out) {
  if (text.empty() || text[0] == 'i' || text[0] == 'n' || text[0] == '-') return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

std::string real_text(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, end);
}

struct SizeMbKind {
  static bool parse(std::string_view text, Bounds b, std::size_t* out) {
    std::int64_t mb = 0;
    if (!parse_integer(text, &mb) || mb < b.low || mb > b.high) return false;
    *out = static_cast<std::size_t>(mb) * kMiB;
    return true;
  }
  static std::string text(std::size_t bytes) { return bytes == kUnlimitedBytes ? "" : std::to_string(bytes / kMiB); }
  static std::string json(std::size_t bytes) { return bytes == kUnlimitedBytes ? "null" : std::to_string(bytes / kMiB); }
};

struct BoolKind {
  static bool parse(std::string_view text, Bounds, bool* out) {
    if (text != "True" && text != "False") return false;
    *out = text == "True";
    return true;
  }
  static std::string text(bool value) { return value ? "True" : "False"; }
  static std::string json(bool value) { return value ? "true" : "false"; }
};

struct FractionKind {
  static bool parse(std::string_view text, Bounds b, double* out) {
    double value = 0;
    if (!parse_real(text, &value) || value < static_cast<double>(b.low) || value > static_cast<double>(b.high)) return false;
    *out = value;
    return true;
  }
  static std::string text(double value) { return real_text(value); }
  static std::string json(double value) { return real_text(value); }
};

struct OpenFractionKind : FractionKind {
  static bool parse(std::string_view text, Bounds b, double* out) {
    double value = 0;
    if (!FractionKind::parse(text, b, &value) || value <= static_cast<double>(b.low) || value >= static_cast<double>(b.high)) return false;
    *out = value;
    return true;
  }
  static std::string text(double value) { return value == 0 ? "" : real_text(value); }
};

struct IntegerKind {
  static bool parse(std::string_view text, Bounds b, std::int64_t* out) {
    std::int64_t value = 0;
    if (!parse_integer(text, &value) || value < b.low || value > b.high) return false;
    *out = value;
    return true;
  }
  static std::string text(std::int64_t value) { return std::to_string(value); }
  static std::string json(std::int64_t value) { return std::to_string(value); }
};

struct PowerOfTwoKind : IntegerKind {
  static bool parse(std::string_view text, Bounds b, std::int64_t* out) {
    std::int64_t value = 0;
    if (!IntegerKind::parse(text, b, &value) || !is_power_of_two(static_cast<std::size_t>(value))) return false;
    *out = value;
    return true;
  }
};

struct TextKind {
  static std::string text(const std::string& value) { return value; }
  static std::string json(const std::string& value) { return '"' + value + '"'; }
};

struct BackendKind : TextKind {
  static bool parse(std::string_view text, Bounds, std::string* out) {
    if (text == "native") text = "caching";  // PyTorch's word for it
    if (text != "caching" && text != "pool" && text != "mmap") return false;
    *out = text;
    return true;
  }
};

struct PathKind : TextKind {
  static bool parse(std::string_view text, Bounds, std::string* out) {
    *out = text;
    return !text.empty();
  }
};

struct DriverNameKind : TextKind {
  static bool parse(std::string_view text, Bounds, std::string* out) {
    if (text != "auto" && text != "sim" && text != "cuda" && text != "hip") return false;
    *out = text;
    return true;
  }
};

struct DivisionsKind {
  static bool parse_count(std::string_view text, bool zero_allowed, std::uint32_t* out) {
    std::int64_t value = 0;
    if (!parse_integer(text, &value) || value < 0 || value > (1 << 20)) return false;
    if (value == 0 ? !zero_allowed : !is_power_of_two(static_cast<std::size_t>(value))) return false;
    *out = static_cast<std::uint32_t>(value);
    return true;
  }

  static bool parse(std::string_view text, Bounds, Divisions* out) {
    Divisions result{};
    std::uint32_t count = 0;
    if (text.empty() || text.front() != '[') {
      if (!parse_count(text, false, &count)) return false;
      result.fill(count);
      *out = result;
      return true;
    }
    if (text.size() < 2 || text.back() != ']') return false;
    text = text.substr(1, text.size() - 2);
    bool first = true, closed = false;
    std::size_t last = 0;
    while (true) {
      const std::size_t comma = text.find(',');
      const std::string_view item = text.substr(0, comma);
      const std::size_t colon = item.find(':');
      if (colon == std::string_view::npos || closed) return false;
      if (!parse_count(item.substr(colon + 1), true, &count)) return false;
      const std::string_view boundary = item.substr(0, colon);
      if (boundary == ">") {
        if (first) return false;
        std::fill(result.begin() + static_cast<std::ptrdiff_t>(last) + 1, result.end(), count);
        closed = true;
      } else {
        std::int64_t mb = 0;
        if (!parse_integer(boundary, &mb) || mb < 1 || mb > (1 << 20) || !is_power_of_two(static_cast<std::size_t>(mb))) return false;
        const std::size_t bucket =
            std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(mb)) - 1), result.size() - 1);
        if (!first && bucket <= last) return false;
        if (first) std::fill(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(bucket), count);
        result[bucket] = count;
        last = bucket;
        first = false;
      }
      if (comma == std::string_view::npos) break;
      text = text.substr(comma + 1);
    }
    *out = result;
    return true;
  }

  static std::string text(const Divisions& value) {
    if (std::all_of(value.begin(), value.end(), [&](auto n) { return n == value[0]; })) {
      return value[0] == 0 ? "" : std::to_string(value[0]);
    }
    std::string result = "[";
    for (std::size_t i = 0; i < value.size(); ++i) {
      result += std::to_string(std::size_t{1} << i) + ":" + std::to_string(value[i]) + (i + 1 < value.size() ? "," : "]");
    }
    return result;
  }

  static std::string json(const Divisions& value) {
    std::string result = "[";
    for (std::size_t i = 0; i < value.size(); ++i) {
      result += std::to_string(value[i]) + (i + 1 < value.size() ? ", " : "]");
    }
    return result;
  }
};

// --- The table, as functions ----------------------------------------------------------------

bool assign(Settings* settings, std::string_view key, std::string_view value) {
#define MYBACKEND_KEY(name, kind, initial, low, high, group, range, meaning) \
  if (key == #name) return kind##Kind::parse(value, Bounds{low, high}, &settings->name);
#include "core/config_keys.inc"
#undef MYBACKEND_KEY
  return false;
}

std::string_view canonical(std::string_view name) {
  if (name == "release_lock_on_hipmalloc") return "release_lock_on_cudamalloc";
  if (name == "pinned_use_hip_host_register") return "pinned_use_cuda_host_register";
  if (name == "throw_on_hipmalloc_oom") return "throw_on_cudamalloc_oom";
  return name;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

Status error_at(std::size_t position, std::string message) {
  return {StatusCode::kInvalidArgument, "allocator configuration, position " + std::to_string(position) + ": " + std::move(message)};
}

// Splits at top-level commas; brackets protect those of a list.
Status split_entries(std::string_view text, std::vector<ConfigEntry>* out) {
  std::size_t begin = 0;
  while (begin <= text.size()) {
    std::size_t end = begin;
    int depth = 0;
    while (end < text.size() && (text[end] != ',' || depth > 0)) {
      depth += text[end] == '[' ? 1 : text[end] == ']' ? -1 : 0;
      ++end;
    }
    std::size_t start = begin;
    while (start < end && std::isspace(static_cast<unsigned char>(text[start]))) ++start;
    const std::string_view item = text.substr(start, end - start);
    const std::string squeezed = without_space(item);
    if (squeezed.empty()) {
      // One empty text, and one trailing comma, mean nothing.
      if (end < text.size() || (begin > 0 && out->empty())) return error_at(start, "an empty entry; expected key:value");
    } else {
      const std::size_t colon = squeezed.find(':');
      const std::string name = squeezed.substr(0, colon);
      if (find_config_key(name) == nullptr) {
        const std::string near = suggest_config_key(name);
        return error_at(start, "unknown key '" + name + "'" + (near.empty() ? "" : "; did you mean '" + near + "'?"));
      }
      if (colon == std::string::npos || colon + 1 == squeezed.size()) {
        return error_at(start, "key '" + name + "' has no value; expected " + name + ":<" + find_config_key(name)->range + ">");
      }
      out->push_back({std::string(canonical(name)), squeezed.substr(colon + 1), start});
    }
    begin = end + 1;
  }
  return {};
}

Status check_at_least_segment(const Settings& settings, const ConfigEntry& entry, std::size_t bytes) {
  if (bytes >= settings.large_segment_size_mb) return {};
  return error_at(entry.position, "key '" + entry.key + "': '" + entry.value + "' is below large_segment_size_mb (" +
                                      std::to_string(settings.large_segment_size_mb / kMiB) + "); expected " +
                                      find_config_key(entry.key)->range);
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> result;
    const Settings defaults;
#define MYBACKEND_KEY(name, kind, initial, low, high, group, range, meaning) \
  result.push_back({#name, #kind, #group, range, meaning, kind##Kind::text(defaults.name)});
#include "core/config_keys.inc"
#undef MYBACKEND_KEY
    return result;
  }();
  return keys;
}

const ConfigKey* find_config_key(std::string_view name) {
  const std::string_view key = canonical(name);
  for (const ConfigKey& candidate : config_keys()) {
    if (key == candidate.name) return &candidate;
  }
  return nullptr;
}

std::string suggest_config_key(std::string_view name) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const ConfigKey& candidate : config_keys()) {
    const std::size_t distance = edit_distance(name, candidate.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate.name;
    }
  }
  return best;
}

Status parse_settings(std::string_view text, Settings* settings, std::vector<ConfigEntry>* entries) {
  std::vector<ConfigEntry> parsed;
  if (Status status = split_entries(text, &parsed); !status.ok()) return status;
  Settings result = *settings;
  for (std::size_t i = 0; i < parsed.size(); ++i) {
    const ConfigEntry& entry = parsed[i];
    for (std::size_t j = 0; j < i; ++j) {
      if (parsed[j].key == entry.key) {
        return error_at(entry.position,
                        "key '" + entry.key + "' is given twice (first at position " + std::to_string(parsed[j].position) + ")");
      }
    }
    if (!assign(&result, entry.key, entry.value)) {
      return error_at(entry.position,
                      "key '" + entry.key + "': bad value '" + entry.value + "'; expected " + find_config_key(entry.key)->range);
    }
  }
  for (const ConfigEntry& entry : parsed) {  // rules between keys, whatever their order
    if (entry.key == "max_split_size_mb") {
      if (Status status = check_at_least_segment(result, entry, result.max_split_size_mb); !status.ok()) return status;
    } else if (entry.key == "max_non_split_rounding_mb") {
      if (Status status = check_at_least_segment(result, entry, result.max_non_split_rounding_mb); !status.ok()) return status;
    } else if (entry.key == "large_segment_size_mb" && result.max_split_size_mb < result.large_segment_size_mb) {
      return error_at(entry.position, "key 'large_segment_size_mb': '" + entry.value + "' is above max_split_size_mb (" +
                                          std::to_string(result.max_split_size_mb / kMiB) + ")");
    }
  }
  *settings = result;
  if (entries) *entries = std::move(parsed);
  return {};
}

std::vector<std::string> settings_warnings(const Settings& s) {
  std::vector<std::string> warnings;
  if (s.expandable_segments && s.max_split_size_mb != kUnlimitedBytes) {
    warnings.push_back(
        "max_split_size_mb works against expandable_segments: blocks of an expandable segment of at least "
        "that size are refused to smaller requests, and mapped anew");
  }
  if (s.garbage_collection_threshold > 0 && s.per_process_memory_fraction >= 1) {
    warnings.push_back(
        "garbage_collection_threshold has no effect without a memory fraction below 1 "
        "(per_process_memory_fraction or set_per_process_memory_fraction)");
  }
  if (s.pinned_max_round_threshold_mb > s.pinned_max_cached_size_mb) {
    warnings.push_back("pinned_max_round_threshold_mb above pinned_max_cached_size_mb rounds up blocks that are never reused");
  }
  return warnings;
}

std::string setting_text(const Settings& settings, std::string_view key) {
  key = canonical(key);
#define MYBACKEND_KEY(name, kind, initial, low, high, group, range, meaning) \
  if (key == #name) return kind##Kind::text(settings.name);
#include "core/config_keys.inc"
#undef MYBACKEND_KEY
  return {};
}

std::string settings_json(const Settings& settings) {
  std::string result;
#define MYBACKEND_KEY(name, kind, initial, low, high, group, range, meaning) \
  result += std::string(result.empty() ? "{" : ", ") + "\"" #name "\": " + kind##Kind::json(settings.name);
#include "core/config_keys.inc"
#undef MYBACKEND_KEY
  return result + "}";
}

// --- Config ---------------------------------------------------------------------------------

std::string settings_difference(const Settings& before, const Settings& after) {
  std::string result;
  for (const ConfigKey& key : config_keys()) {
    const std::string value = setting_text(after, key.name);
    if (value == setting_text(before, key.name)) continue;
    result += (result.empty() ? "" : ",") + std::string(key.name) + ":" + value;
  }
  return result;
}

Settings Config::settings() const {
  std::lock_guard lock(mutex_);
  return settings_;
}

std::string Config::origin(std::string_view key) const {
  std::lock_guard lock(mutex_);
  key = canonical(key);
  for (const auto& [name, origin] : origins_) {
    if (name == key) return origin;
  }
  return "default";
}

Status Config::set(std::string_view text, const std::string& origin) {
  Settings changed;
  std::vector<std::function<void(const Settings&)>> listeners;
  {
    std::lock_guard lock(mutex_);
    std::vector<ConfigEntry> entries;
    changed = settings_;
    if (Status status = parse_settings(text, &changed, &entries); !status.ok()) return status;
    settings_ = changed;
    for (const ConfigEntry& entry : entries) {
      std::erase_if(origins_, [&](const auto& known) { return known.first == entry.key; });
      origins_.emplace_back(entry.key, origin);
    }
    listeners = listeners_;
  }
  for (const auto& listener : listeners) listener(changed);
  return {};
}

void Config::reset() {
  std::vector<std::function<void(const Settings&)>> listeners;
  {
    std::lock_guard lock(mutex_);
    settings_ = Settings();
    origins_.clear();
    listeners = listeners_;
  }
  for (const auto& listener : listeners) listener(Settings());
}

void Config::on_change(std::function<void(const Settings&)> listener) {
  std::lock_guard lock(mutex_);
  listeners_.push_back(std::move(listener));
}

const char* config_variable_in_force() {
  for (const char* name : {"MYBACKEND_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return name;
  }
  return nullptr;
}

}  // namespace mybackend

#include "replay/trace.h"

#include <charconv>
#include <string>
#include <unordered_map>

namespace mybackend::replay {
namespace {

class Fields {
 public:
  explicit Fields(std::string_view line) : rest_(line) {}

  std::string_view next() {
    const std::size_t begin = rest_.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) {
      rest_ = {};
      return {};
    }
    const std::size_t end = rest_.find_first_of(" \t\r", begin);
    const std::string_view field = rest_.substr(begin, end == std::string_view::npos ? end : end - begin);
    rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end);
    return field;
  }

  template <class Number>
  bool number(Number* out) {
    const std::string_view field = next();
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), *out);
    return !field.empty() && error == std::errc() && end == field.data() + field.size();
  }

 private:
  std::string_view rest_;
};

const char* form_of(char kind) {
  switch (kind) {
    case 'a': return "a ID BYTES STREAM";
    case 'f': return "f ID";
    case 'r': return "r ID STREAM";
    case 'q': return "q STREAM";
    case 'e': return "e";
    case 'p': return "p";
    case 'm': return "m FRACTION";
    case 'b': return "b POOL";
    case 'n': return "n POOL";
    case 'd': return "d POOL";
    default: return nullptr;
  }
}

}  // namespace

Status parse_trace(std::string_view text, Trace* out) {
  out->events.clear();
  out->ids.clear();
  std::unordered_map<std::int64_t, std::uint32_t> index_of;
  std::size_t line_number = 0;
  auto fail = [&](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, "trace, line " + std::to_string(line_number) + ": " + what);
  };
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    ++line_number;
    Fields fields(line);
    const std::string_view kind = fields.next();
    if (kind.empty() || kind.front() == '#') continue;
    const char* form = kind.size() == 1 ? form_of(kind.front()) : nullptr;
    if (form == nullptr) return fail("unknown event '" + std::string(kind) + "'");
    TraceEvent event;
    event.kind = kind.front();
    std::int64_t id = 0;
    bool good = true;
    switch (event.kind) {
      case 'a': good = fields.number(&id) && fields.number(&event.bytes) && fields.number(&event.stream); break;
      case 'f': good = fields.number(&id); break;
      case 'r': good = fields.number(&id) && fields.number(&event.stream); break;
      case 'q': good = fields.number(&event.stream); break;
      case 'm': {
        double fraction = 0;
        good = fields.number(&fraction) && fraction >= 0 && fraction <= 1;
        event.fraction = fraction;
        break;
      }
      case 'b':
      case 'n':
      case 'd': good = fields.number(&event.id) && event.id > 0; break;
      default: break;
    }
    if (!good || !fields.next().empty()) return fail("expected '" + std::string(form) + "', found '" + std::string(line) + "'");
    if (event.kind == 'a') {
      event.id = static_cast<std::uint32_t>(out->ids.size());
      auto [slot, added] = index_of.try_emplace(id, event.id);
      if (added)
        out->ids.push_back(id);
      else
        event.id = slot->second;
    } else if (event.kind == 'f' || event.kind == 'r') {
      auto found = index_of.find(id);
      if (found == index_of.end()) return fail("allocation " + std::to_string(id) + " was never made");
      event.id = found->second;
    }
    out->events.push_back(event);
  }
  return {};
}

}  // namespace mybackend::replay

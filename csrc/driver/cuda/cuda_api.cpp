#include "driver/cuda/cuda_api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace mybackend::cuda {
namespace {

struct Symbol {
  const char* member;
  const char* names[2];  // by Vendor
};
constexpr Symbol kSymbols[] = {
#define X(member, cuda_symbol, hip_symbol, ...) {#member, {cuda_symbol, hip_symbol}},
    MYBACKEND_CUDA_SYMBOLS(X)
#undef X
};
constexpr const char* kLibraries[] = {"libcuda.so.1", "libamdhip64.so"};
constexpr const char* kVendorNames[] = {"CUDA", "HIP"};

}  // namespace

Status Api::load(Vendor vendor, Api* out) {
  const int v = static_cast<int>(vendor);
  const char* library = std::getenv("MYBACKEND_CUDA_LIBRARY");
  const bool is_given = library != nullptr && *library != '\0';
  if (!is_given) library = kLibraries[v];
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return {StatusCode::kNotSupported, std::string("no ") + kVendorNames[v] + " driver: " + library +
                                           (is_given ? " (named by MYBACKEND_CUDA_LIBRARY)" : "") + " cannot be loaded (" +
                                           (why != nullptr ? why : "no reason given") + ")"};
  }
  Api api;
  api.vendor = vendor;
  api.library = library;
  std::string missing;
  const Symbol* symbol = kSymbols;
#define X(member, cuda_symbol, hip_symbol, ...)                                                      \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(handle, symbol->names[v]));              \
  if (api.member == nullptr) missing += std::string(missing.empty() ? "" : ", ") + symbol->names[v]; \
  ++symbol;
  MYBACKEND_CUDA_SYMBOLS(X)
#undef X
  if (!missing.empty()) {
    dlclose(handle);
    return {StatusCode::kNotSupported, std::string("the ") + kVendorNames[v] + " driver " + library + " is too old: it has no " + missing};
  }
  *out = std::move(api);
  return {};
}

const char* Api::symbol(const char* member) const noexcept {
  for (const Symbol& symbol : kSymbols) {
    if (std::strcmp(symbol.member, member) == 0) return symbol.names[static_cast<int>(vendor)];
  }
  return member;
}

std::string Api::error_text(Result result) const {
  const char* name = nullptr;
  const char* words = nullptr;
  if (get_error_name == nullptr || get_error_name(result, &name) != kSuccess || name == nullptr) return "error " + std::to_string(result);
  if (get_error_string(result, &words) != kSuccess || words == nullptr) return name;
  return std::string(name) + " (" + words + ")";
}

}  // namespace mybackend::cuda

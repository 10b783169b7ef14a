// The typed way to borrow: one template over at::_ops, no boxing. For the operators on the hot
// path.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>

#include "torch/borrow.h"
#include "torch/generator.h"

namespace mybackend::glue {

// Holds one argument for the duration of the call, as the borrowed kernel wants it.
template <class A>
struct Holder {
  A value;
  Holder(BorrowFrame&, A given) : value(std::forward<A>(given)) {}
  static void see(BorrowFrame&, const std::remove_reference_t<A>&) {}
  A get() { return std::forward<A>(value); }
};

template <>
struct Holder<const at::Tensor&> {
  const at::Tensor& value;
  Holder(BorrowFrame& frame, const at::Tensor& given) : value(frame.alias(given)) {}
  static void see(BorrowFrame& frame, const at::Tensor& given) { frame.see(given); }
  const at::Tensor& get() { return value; }
};

template <>
struct Holder<at::Tensor&> {
  at::Tensor& value;
  // The alias is a handle of the frame: a kernel may rebind it without harm.
  Holder(BorrowFrame& frame, at::Tensor& given) : value(const_cast<at::Tensor&>(frame.alias(given, true))) {}
  static void see(BorrowFrame& frame, const at::Tensor& given) { frame.see(given, true); }
  at::Tensor& get() { return value; }
};

template <>
struct Holder<const std::optional<at::Tensor>&> {
  std::optional<at::Tensor> value;
  Holder(BorrowFrame& frame, const std::optional<at::Tensor>& given) {
    // Batch norm changes its running statistics, and its schema does not say so.
    if (given.has_value()) value = frame.alias(*given, false, true);
  }
  static void see(BorrowFrame& frame, const std::optional<at::Tensor>& given) {
    if (given.has_value()) frame.see(*given);
  }
  const std::optional<at::Tensor>& get() { return value; }
};

template <>
struct Holder<at::TensorList> {
  std::vector<at::Tensor> value;
  // In-place list operators take a TensorList too; aliases of lists are always written back.
  Holder(BorrowFrame& frame, at::TensorList given) {
    value.reserve(given.size());
    for (const at::Tensor& tensor : given) value.push_back(frame.alias(tensor, true));
  }
  static void see(BorrowFrame& frame, at::TensorList given) {
    for (const at::Tensor& tensor : given) frame.see(tensor);
  }
  at::TensorList get() { return value; }
};

template <>
struct Holder<const at::ITensorListRef&> {
  std::vector<at::Tensor> value;
  std::optional<at::ITensorListRef> list;
  Holder(BorrowFrame& frame, const at::ITensorListRef& given) {
    value.reserve(given.size());
    for (const at::Tensor& tensor : given) value.push_back(frame.alias(tensor));
  }
  static void see(BorrowFrame& frame, const at::ITensorListRef& given) {
    for (const at::Tensor& tensor : given) frame.see(tensor);
  }
  const at::ITensorListRef& get() { return list.emplace(at::TensorList(value)); }
};

template <>
struct Holder<std::optional<at::Generator>> {
  std::optional<at::Generator> value;
  Holder(BorrowFrame& frame, const std::optional<at::Generator>& given) : value(borrowed_generator(given, frame.device())) {}
  static void see(BorrowFrame&, const std::optional<at::Generator>&) {}
  std::optional<at::Generator> get() { return value; }
};

// The result as the caller must see it.
inline at::Tensor adopt_result(BorrowFrame& frame, at::Tensor&& result) {
  return frame.adopt(std::move(result));
}

inline std::vector<at::Tensor> adopt_result(BorrowFrame& frame, std::vector<at::Tensor>&& results) {
  for (at::Tensor& tensor : results) tensor = frame.adopt(std::move(tensor));
  return std::move(results);
}

template <class... T>
std::tuple<T...> adopt_result(BorrowFrame& frame, std::tuple<T...>&& results) {
  return std::apply([&](auto&&... each) { return std::tuple<T...>(adopt_result(frame, std::move(each))...); }, std::move(results));
}

template <class T>
  requires(!std::is_same_v<T, at::Tensor>)
T adopt_result(BorrowFrame&, T&& result) {
  return std::forward<T>(result);
}

template <class Op, class Schema = typename Op::schema>
struct Typed;

template <class Op, class R, class... A>
struct Typed<Op, R(A...)> {
  static R call(A... arguments) {
    BorrowFrame frame(Op::name);
    (Holder<A>::see(frame, arguments), ...);
    frame.open();
    std::tuple<Holder<A>...> held{Holder<A>(frame, std::forward<A>(arguments))...};
    return std::apply(
        [&](auto&... each) -> R {
          const c10::DispatchKeySet keys = lender_keys();
          if constexpr (std::is_void_v<R>) {
            Op::redispatch(keys, each.get()...);
            frame.write_back();
          } else if constexpr (std::is_same_v<R, at::Tensor&>) {
            Op::redispatch(keys, each.get()...);
            frame.write_back();
            return written<A...>(arguments...);
          } else {
            R result = Op::redispatch(keys, each.get()...);
            return adopt_result(frame, std::move(result));
          }
        },
        held);
  }

 private:
  template <class First, class... Rest>
  static at::Tensor& written(std::remove_reference_t<First>& first, std::remove_reference_t<Rest>&... rest) {
    if constexpr (std::is_same_v<First, at::Tensor&>)
      return first;
    else
      return written<Rest...>(rest...);
  }
};

// MYBACKEND_BORROW(m, add, Tensor): registers at::_ops::add_Tensor for "add.Tensor".
#define MYBACKEND_BORROW(m, name, overload) \
  m.impl(#name "." #overload, TORCH_FN((&::mybackend::glue::Typed<at::_ops::name##_##overload>::call)))
#define MYBACKEND_BORROW0(m, name) m.impl(#name, TORCH_FN((&::mybackend::glue::Typed<at::_ops::name>::call)))

}  // namespace mybackend::glue

// Small helpers over the LibTorch stable ABI: typed pointers with checks, and new tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <type_traits>

namespace hetrec {

using torch::stable::Tensor;

template <typename T>
constexpr torch::headeronly::ScalarType scalar_type() {
  using torch::headeronly::ScalarType;
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<U, int64_t>) return ScalarType::Long;
  if constexpr (std::is_same_v<U, int32_t>) return ScalarType::Int;
  if constexpr (std::is_same_v<U, uint8_t>) return ScalarType::Byte;
}

template <typename T>
constexpr const char* type_name() {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_same_v<U, float>) return "float32";
  if constexpr (std::is_same_v<U, int64_t>) return "int64";
  if constexpr (std::is_same_v<U, int32_t>) return "int32";
  if constexpr (std::is_same_v<U, uint8_t>) return "uint8";
}

// The tensor's data as `T`; const T for what is only read.
template <typename T>
T* data(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == scalar_type<T>(), name, " must be ", type_name<T>());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(tensor.const_data_ptr());
  } else {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }
}

template <typename T>
T* data_or_null(const std::optional<Tensor>& tensor, const char* name) {
  return tensor.has_value() ? data<T>(*tensor, name) : nullptr;
}

template <typename T>
Tensor empty(std::initializer_list<int64_t> size) {
  return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(size.begin(), size.size()), scalar_type<T>());
}

template <typename T>
Tensor from_values(const T* values, int64_t n) {
  Tensor out = empty<T>({n});
  T* to = data<T>(out, "out");
  for (int64_t i = 0; i < n; ++i) to[i] = values[i];
  return out;
}

}  // namespace hetrec

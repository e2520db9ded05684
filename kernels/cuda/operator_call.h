// What every operator needs: its text arguments, its results, and the record that a launch leaves.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <string>
#include <vector>

#include "operands.h"

namespace ropecheck {

using LaunchCallback = void (*)(const char* operator_name, const char* direction, int device_index,
                                const char* configuration, const char* reason);

inline std::atomic<LaunchCallback> launch_callback{nullptr};

// A string argument, which the callee owns. torch's own conversion to std::string leaks one string for each call.
class Text {
 public:
  explicit Text(StringHandle handle) : handle_(handle) {}
  ~Text() { torch_delete_string(handle_); }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  const char* c_str() const {
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_, &data));
    return data;
  }

 private:
  StringHandle handle_;
};

// `describe` says what the configuration was; it is asked only where somebody listens.
template <typename Describe>
void report_launch(const char* operator_name, const char* direction, std::int32_t device, const Text& reason,
                   const Describe& describe) {
  if (const LaunchCallback callback = launch_callback.load(std::memory_order_acquire)) {
    callback(operator_name, direction, device, describe().c_str(), reason.c_str());
  }
}

// A new contiguous tensor on the device of `like`.
inline Tensor empty_contiguous(const std::vector<std::int64_t>& sizes, std::int32_t dtype, const Tensor& like) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * (sizes[i] > 0 ? sizes[i] : 1);
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, aoti_torch_device_type_cuda(),
                                                  like.get_device_index(), &made));
  return Tensor(made);
}

}  // namespace ropecheck

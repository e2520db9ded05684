// The stream that torch has made current on a device.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ropecheck {

// Only CUDA builds of torch carry the call, so it is looked up when first needed: linked, this library would not load
// beside a CPU-only torch. Throws std::runtime_error.
inline void* current_stream(std::int32_t device) {
  using Lookup = AOTITorchError (*)(std::int32_t, void**);
  static const Lookup lookup = [] {
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch_cuda == nullptr) {
      throw std::runtime_error("the current CUDA stream cannot be asked for: this torch was built without CUDA");
    }
    void* const found = dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
    if (found == nullptr) {
      throw std::runtime_error("the current CUDA stream cannot be asked for: " + std::string(dlerror()));
    }
    return reinterpret_cast<Lookup>(found);
  }();
  void* stream = nullptr;
  if (lookup(device, &stream) != TORCH_SUCCESS) {
    throw std::runtime_error("torch does not say which stream of cuda:" + std::to_string(device) + " is current");
  }
  return stream;
}

}  // namespace ropecheck

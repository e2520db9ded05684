// What is said where CUDA refuses: std::runtime_error with CUDA's name and message.
#pragma once

#include <stdexcept>
#include <string>

namespace ropecheck {

[[noreturn]] inline void fail(const char* what, cudaError_t error) {
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

// Whether an error is one that a kernel meets while it runs. A launch returns before its kernel runs, so there such an
// error belongs to work that was queued earlier.
inline bool is_of_earlier_work(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

// Called before a launch: an error left over from elsewhere would be taken for the launch's own.
inline void require_no_pending_error() {
  if (const cudaError_t pending = cudaGetLastError(); pending != cudaSuccess) {
    fail("nothing was launched, because an earlier CUDA operation had failed", pending);
  }
}

// Called after a launch.
inline void require_launched() {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    fail(is_of_earlier_work(error) ? "nothing was launched, because work queued earlier on this device had failed"
                                   : "the kernel could not be launched",
         error);
  }
}

}  // namespace ropecheck

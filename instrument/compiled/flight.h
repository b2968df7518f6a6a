// Reads torch's flight recorder of NCCL calls without the interpreter's lock: a dump of 2,000 entries takes about
// 30 ms, for which training would wait.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace crossrank {

// Lets this thread query events without breaking the capture of a CUDA graph on any thread: see torch_dumps.py.
class BesideCaptures {
 public:
  BesideCaptures() { exchange(); }
  ~BesideCaptures() { exchange(); }
  BesideCaptures(const BesideCaptures &) = delete;
  BesideCaptures &operator=(const BesideCaptures &) = delete;

 private:
  void exchange() {  // writes the previous mode to `mode_`
    using Exchange = int (*)(int *);
    static const Exchange function = [] {
      void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
      return driver == nullptr ? nullptr
                               : reinterpret_cast<Exchange>(dlsym(driver, "cuThreadExchangeStreamCaptureMode"));
    }();
    if (function != nullptr) function(&mode_);
  }
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
};

// Returns the recorder as JSON; empty if this process has none: only torch's GPU library contains NCCL. torch_dumps.py
// says which of torch's recorders has the NCCL calls.
inline std::string dump_nccl_recorder() {
  using Dump = std::string (*)(bool, bool);
  using DumpOf = std::string (*)(bool, bool, const std::string &);
#if _GLIBCXX_USE_CXX11_ABI
  constexpr const char *kDump = "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb";
  constexpr const char *kDumpOf =
      "_ZN4c10d18dump_fr_trace_jsonEbbRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
#else
  constexpr const char *kDump = "_ZN4c10d20dump_nccl_trace_jsonEbb", *kDumpOf = "_ZN4c10d18dump_fr_trace_jsonEbbRKSs";
#endif
  static void *const library = [] {
    void *cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return cuda != nullptr ? cuda : dlopen("libtorch_hip.so", RTLD_LAZY | RTLD_NOLOAD);
  }();
  if (library == nullptr) return {};
  static const DumpOf dump_of = [] {
    const char *wanted = std::getenv("TORCH_DIST_USE_NCCL2");
    const bool is_old = wanted != nullptr && std::strcmp(wanted, "0") == 0;
    return is_old ? nullptr : reinterpret_cast<DumpOf>(dlsym(library, kDumpOf));  // of libtorch_cpu, which it needs
  }();
  static const Dump dump = reinterpret_cast<Dump>(dlsym(library, kDump));
  constexpr bool kWithCalls = true, kOnlyOpen = false;
  const BesideCaptures guard;
  if (dump_of != nullptr) return dump_of(kWithCalls, kOnlyOpen, "nccl2");
  return dump == nullptr ? std::string() : dump(kWithCalls, kOnlyOpen);
}

}  // namespace crossrank

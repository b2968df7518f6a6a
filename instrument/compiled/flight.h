// torch's flight recorder of NCCL's calls, read without the interpreter's lock: to write out 2,000 entries takes some
// 30 ms, which training would wait for.
#pragma once

#include <dlfcn.h>

#include <string>

namespace crossrank {

// The recorder as JSON; empty where this process has none, for NCCL is part of torch's library for GPUs alone.
inline std::string dump_nccl_recorder() {
  using Dump = std::string (*)(bool, bool);
#if _GLIBCXX_USE_CXX11_ABI
  constexpr const char *kDump = "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb";
#else
  constexpr const char *kDump = "_ZN4c10d20dump_nccl_trace_jsonEbb";
#endif
  static const Dump dump = [] {
    for (const char *name : {"libtorch_cuda.so", "libtorch_hip.so"})
      if (void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
        if (void *found = dlsym(library, kDump)) return reinterpret_cast<Dump>(found);
    return Dump{nullptr};
  }();
  return dump == nullptr ? std::string() : dump(/*includeCollectives=*/true, /*onlyActive=*/false);
}

}  // namespace crossrank

#include "isa.h"

#include <cstring>
#include <string>

namespace jaxinfer {

extern const Kernels isa_portable;
#if defined(__x86_64__)
extern const Kernels isa_avx2, isa_avx512, isa_avx512_vnni, isa_avx512_bf16;
#endif

namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*is_here)();
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

const Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512_bf16", &isa_avx512_bf16, has_bf16},
    {"avx512_vnni", &isa_avx512_vnni, has_vnni},
    {"avx512", &isa_avx512, has_avx512},
    {"avx2", &isa_avx2, has_avx2},
#endif
    {"portable", &isa_portable, [] { return true; }},
};

}  // namespace

const Kernels* kernels_of(const char* name) {
  bool any = std::strcmp(name, "auto") == 0;
  for (const Isa& isa : kIsas)
    if ((any || std::strcmp(name, isa.name) == 0) && isa.is_here()) return isa.kernels;
  return nullptr;
}

const char* isa_names() {
  static const std::string names = [] {
    std::string all;
    for (const Isa& isa : kIsas)
      if (isa.is_here()) all += std::string(all.empty() ? "" : " ") + isa.name;
    return all;
  }();
  return names.c_str();
}

}  // namespace jaxinfer

// Compiled for any x86-64 CPU, unlike the rest: asked before anything of the rest may run.
extern "C" int stallfree_is_supported(int is_bfloat16) {
  __builtin_cpu_init();
  const bool has_floats = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_floats && (!is_bfloat16 || (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")));
}

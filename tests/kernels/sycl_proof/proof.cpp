// Builds the device code of one .sycl file with DPC++ and gives its launchers a queue on the CPU.
//
// Compiled together with that file by the host compiler (tests/kernels/on_cpu.py).

#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "launch.h"

namespace {

namespace syclex = sycl::ext::oneapi::experimental;
using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

std::set<std::string>& functors() {
  static std::set<std::string> names;
  return names;
}

sycl::queue& queue() {
  static sycl::queue cpu{sycl::cpu_selector_v, sycl::property::queue::in_order{}};
  return cpu;
}

// Maps the path of a .sycl file to the functors that were built from this file.
std::map<std::string, Bundle>& bundles() {
  static std::map<std::string, Bundle> built;
  return built;
}

std::string file_in_use;
int lanes_in_use = 16;

// A lambda cannot be launched by name, a free function can. Functors are instantiated first: DPC++
// 2026.2 crashes on a kernel's parameter whose class template is not.
std::string source(const std::string& file, const std::vector<std::string>& wanted) {
  std::string text = "#include \"" + file + "\"\n";
  for (const std::string& name : wanted)
    text += "template struct optimus::Functor<" + name + ">;\n";
  for (const char* lanes : {"16", "32"})
    text += std::string(R"(
template <class Kernel>
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::sub_group_size<)") +
            lanes + ">))\nvoid run" + lanes + R"((optimus::Functor<Kernel> functor) {
  functor(sycl::ext::oneapi::this_work_item::get_nd_item<1>());
}
)";
  return text;
}

std::string kernel_name(int lanes, const std::string& functor) {
  return "run" + std::to_string(lanes) + "<" + functor + ">";
}

// Runs body. Returns 0, or 1 if body throws; the exception and `words` are then written to log [size].
template <class Body>
int guarded(char* log, int size, const std::string& words, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(log, size, "%s\n%s", error.what(), words.c_str());
    return 1;
  }
}

}  // namespace

namespace sycl_proof {

bool add(const std::string& name) {
  functors().insert(name);
  return true;
}

sycl::kernel find(const std::string& name) {
  return bundles().at(file_in_use).ext_oneapi_get_kernel(kernel_name(lanes_in_use, name));
}

}  // namespace sycl_proof

#define PROOF_API __attribute__((visibility("default")))

extern "C" {

PROOF_API void* proof_queue() { return &queue(); }
PROOF_API int proof_num_functors() { return static_cast<int>(functors().size()); }

// After this call, launchers run the functors that were built from `file`, in sub-groups of 16 or 32.
PROOF_API void proof_use(const char* file, int lanes) {
  file_in_use = file;
  lanes_in_use = lanes;
}

PROOF_API void proof_device(char* name, int size) {
  const sycl::device device = queue().get_device();
  const auto runtime = device.get_platform().get_info<sycl::info::platform::name>();
  const auto text = device.get_info<sycl::info::device::name>();
  std::snprintf(name, size, "%s: %s", runtime.c_str(), text.c_str());
}

// Makes the functors of `file` whose names contain `part` ready to run, in sub-groups of 16 and of 32.
PROOF_API int proof_build(const char* file, const char* part, const char* const* options, int count,
                          char* log, int size) {
  std::string words;
  return guarded(log, size, words, [&] {
    std::vector<std::string> wanted, kernels;
    for (const std::string& name : functors())
      if (name.find(part) != std::string::npos) wanted.push_back(name);
    for (const std::string& name : wanted)
      for (const int lanes : {16, 32}) kernels.push_back(kernel_name(lanes, name));
    auto text = syclex::create_kernel_bundle_from_source(
        queue().get_context(), syclex::source_language::sycl, source(file, wanted));
    const std::vector<std::string> flags(options, options + count);
    const Bundle built = syclex::build(
        text, syclex::properties{syclex::save_log{&words}, syclex::registered_names{kernels},
                                 syclex::build_options{flags}});
    bundles().insert_or_assign(file, built);
  });
}

// Compiles `file` without a target device.
PROOF_API int proof_compile(const char* file, const char* const* options, int count, char* log,
                            int size) {
  std::string words;
  return guarded(log, size, words, [&] {
    auto text = syclex::create_kernel_bundle_from_source(
        queue().get_context(), syclex::source_language::sycl,
        "#include \"" + std::string(file) + "\"\n");
    const std::vector<std::string> flags(options, options + count);
    syclex::compile(
        text, syclex::properties{syclex::save_log{&words}, syclex::build_options{flags}});
  });
}

// Waits until all kernels have ended. Returns 0 if no kernel had an error.
PROOF_API int proof_wait(char* log, int size) {
  return guarded(log, size, "", [] { queue().wait_and_throw(); });
}
}

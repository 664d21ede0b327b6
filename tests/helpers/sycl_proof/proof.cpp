// Builds the device code of one .sycl file with DPC++ and gives its launchers a CPU queue.
//
// Compiled together with the .sycl file by the host compiler (tests/helpers/sycl_cpu.py).

#include <cstdio>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "launch.h"

namespace {

namespace syclex = sycl::ext::oneapi::experimental;
using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

std::set<std::string>& names() {
  static std::set<std::string> all;
  return all;
}

sycl::queue& queue() {
  static sycl::queue one{sycl::cpu_selector_v, sycl::property::queue::in_order{}};
  return one;
}

std::map<int, Bundle>& bundles() {
  static std::map<int, Bundle> all;
  return all;
}

int lanes_in_use = 0;

// Functors are instantiated by name first: DPC++ 2026.2 crashes on a kernel's parameter whose class
// template is not.
std::string source(const std::string& file, int lanes) {
  std::string instances;
  for (const std::string& name : names())
    instances += "template struct optimus::Functor<" + name + ">;\n";
  return "#include \"" + file + "\"\n" + instances + R"(
template <class Kernel>
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::sub_group_size<)" +
         std::to_string(lanes) + R"(>))
void run(optimus::Functor<Kernel> functor) {
  functor(sycl::ext::oneapi::this_work_item::get_nd_item<1>());
}
)";
}

std::string kernel_name(const std::string& functor) { return "run<" + functor + ">"; }

}  // namespace

namespace sycl_proof {

bool add(const std::string& name) { return names().insert(name).second || true; }

sycl::kernel find(const std::string& name) {
  return bundles().at(lanes_in_use).ext_oneapi_get_kernel(kernel_name(name));
}

}  // namespace sycl_proof

extern "C" {

// Compiles `file` for sub-groups of `lanes` and uses that from now on. 0, or 1 with the compiler's
// words in log [size].
__attribute__((visibility("default"))) int proof_build(const char* file, int lanes,
                                                       const char* const* options, int num_options,
                                                       char* log, int size) {
  std::string words;
  try {
    std::vector<std::string> kernels;
    for (const std::string& name : names()) kernels.push_back(kernel_name(name));
    auto from = syclex::create_kernel_bundle_from_source(
        queue().get_context(), syclex::source_language::sycl, source(file, lanes));
    const std::vector<std::string> flags(options, options + num_options);
    const Bundle built = syclex::build(
        from, syclex::properties{syclex::save_log{&words}, syclex::registered_names{kernels},
                                 syclex::build_options{flags}});
    bundles().insert_or_assign(lanes, built);
    lanes_in_use = lanes;
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(log, size, "%s\n%s", error.what(), words.c_str());
    return 1;
  }
}

__attribute__((visibility("default"))) void* proof_queue() { return &queue(); }

__attribute__((visibility("default"))) void proof_device(char* name, int size) {
  const auto text = queue().get_device().get_info<sycl::info::device::name>();
  std::snprintf(name, size, "%s", text.c_str());
}

__attribute__((visibility("default"))) int proof_num_kernels() { return names().size(); }

// 0 when all work is done without an error.
__attribute__((visibility("default"))) int proof_wait() {
  try {
    queue().wait_and_throw();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
}

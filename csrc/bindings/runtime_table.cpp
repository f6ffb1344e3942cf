#include "bindings/runtime_table.h"

#include <map>
#include <mutex>

#include "base/common.h"

namespace ldc {
namespace {

struct Table {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Runtime>> runtimes;  // an empty entry reserves its serial
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

int64_t reserve_serial(int64_t wanted) {
  LDC_CHECK_ARG(wanted >= -1 && wanted < (int64_t{1} << 31), "Runtime: `serial` must be -1 or in [0, 2**31), got ",
                wanted, ".");
  const std::lock_guard lock(table().mutex);
  int64_t serial = wanted;
  if (wanted < 0) {
    for (serial = 1; table().runtimes.contains(serial);) ++serial;
  }
  LDC_CHECK_ARG(table().runtimes.try_emplace(serial).second, "Runtime: serial ", serial,
                " is in use. Close that runtime first, or pass serial=-1.");
  return serial;
}

void enter_runtime(int64_t serial, std::weak_ptr<Runtime> runtime) {
  const std::lock_guard lock(table().mutex);
  table().runtimes[serial] = std::move(runtime);
}

void forget_serial(int64_t serial) {
  const std::lock_guard lock(table().mutex);
  table().runtimes.erase(serial);
}

std::shared_ptr<Runtime> find_runtime(int64_t id) {
  LDC_CHECK_ARG(id >= 0, "ids of parameters and graphs are not negative, got ", id, ".");
  const int64_t serial = serial_of(id);
  std::shared_ptr<Runtime> runtime;
  {
    const std::lock_guard lock(table().mutex);
    if (const auto found = table().runtimes.find(serial); found != table().runtimes.end()) {
      runtime = found->second.lock();
    }
  }
  LDC_CHECK(runtime != nullptr || serial != 0, "id ", id, " belongs to the `dc` functions' runtime, which is not there. ",
            "Call dc.init(pg, config, initial_reduce_bucket_size) first.");
  LDC_CHECK(runtime != nullptr, "runtime ", serial, " was closed or never created (id ", id,
            "). Programs and parameters can be used only while their strategy is set up.");
  return runtime;
}

}  // namespace ldc

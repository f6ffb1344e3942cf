// serial → runtime. The one piece of process-global state: an operator gets nothing but integers and tensors.
#pragma once

#include <cstdint>
#include <memory>

namespace ldc {

class Runtime;

// Ids of parameters and graphs are (serial << 32) | local number. Serial 0 is the runtime of the `dc` functions, whose
// ids are therefore plain small numbers.
inline int64_t serial_of(int64_t id) { return id >> 32; }
inline int64_t local_of(int64_t id) { return id & 0xffffffff; }

/// Takes `wanted`, or the lowest free number from 1 on if it is -1.
int64_t reserve_serial(int64_t wanted);
void enter_runtime(int64_t serial, std::weak_ptr<Runtime> runtime);
void forget_serial(int64_t serial);
/// The runtime that a parameter or graph id belongs to. Raises if there is none.
std::shared_ptr<Runtime> find_runtime(int64_t id);

}  // namespace ldc

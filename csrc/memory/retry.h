// Handles a shortage of device memory: this rank gives back memory that it does not need, and tries again.
//
// A rank that is short of memory cannot give up a step: the others would wait for its collectives. It may do only what
// other ranks do not notice. In order of cost: wait for reductions that are on their way and drop the gradients
// that they read; free the arena's slots; send gathered parameters that nobody reads at the moment to host memory, from
// where the next wait for them brings them back. Waiting for a collective that this rank has launched is safe: its
// peers launch it before anything that they could want from this rank first.
#pragma once

#include <c10/util/Exception.h>

#include <functional>

#include "base/common.h"

namespace ldc {

/// Gives some memory back; returns how many bytes, 0 if there is nothing left to give.
using GiveBack = std::function<int64_t()>;

/// What `allocate` returns; while memory is short, tries again as long as `give_back` finds something. `allocate` must
/// leave nothing behind when it raises. Without errors this costs nothing.
template <typename Allocate>
auto allocate_with_retry(const GiveBack& give_back, const Allocate& allocate) {
  while (true) {
    try {
      return allocate();
    } catch (const c10::OutOfMemoryError&) {
      if (!give_back || give_back() == 0) throw;
    }
  }
}

}  // namespace ldc

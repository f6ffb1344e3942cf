// Counters that tests assert on and users see.
#pragma once

#include <cstdint>

namespace ldc {

struct Stats {
  int64_t gathers = 0;         // parameters
  int64_t gather_groups = 0;   // collectives issued for them
  int64_t gathered_bytes = 0;  // of whole parameters, padding included
  int64_t symmetric_gathers = 0;  // of these groups, those that went through symmetric memory
  int64_t gather_hits = 0;     // requests for parameters that were gathered already
  int64_t reductions = 0;      // gradients
  int64_t reduce_groups = 0;
  int64_t reduced_bytes = 0;   // of whole gradients as they travelled
  int64_t fetched_bytes = 0;   // of shards that live in host memory, copied to the device to be gathered
  int64_t offloaded_bytes = 0;
  int64_t reloaded_bytes = 0;
  int64_t stayed_tensors = 0;  // that should have left, and for which the host had no memory
  int64_t state_peak_bytes = 0;  // most device memory of offloaded optimizer states on their way in and out
  int64_t sent_away_bytes = 0;  // gathered parameters that waited in host memory as the device was short of memory
  int64_t away_peak_bytes = 0;  // the most of them at a time
  int64_t copied_grads = 0;    // gradients that needed a send buffer: uneven rows, another dtype, or strides
};

}  // namespace ldc

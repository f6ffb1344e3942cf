// One collective that finds out whether all ranks mean the same thing, and what differs if they do not.
#pragma once

#include <string>
#include <vector>

#include "communicator.h"

namespace ldc {

/// Raises on every rank, with the same message, if `lines` differ between ranks; the message names `what` and quotes
/// the first line that differs. One small collective while all is well, two more if not. Waits for the device.
void require_same_on_all_ranks(Communicator& wire, Device device, std::string_view what,
                               const std::vector<std::string>& lines);

}  // namespace ldc

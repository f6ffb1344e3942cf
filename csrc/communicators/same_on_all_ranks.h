// Small collectives between hosts: what every rank says, and whether all mean the same thing.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "communicators/communicator.h"

namespace ldc {

/// FNV-1a. Not std::hash, which may differ between builds.
int64_t digest(const std::string& text);

/// Everybody's `mine` (on the host, equally long on all ranks), one row per rank, on the host. Waits for the device.
Tensor collect(Communicator& wire, Device device, const Tensor& mine, std::string_view name);

/// Raises on every rank, with the same message, if `lines` differ between ranks; the message names `what` and quotes
/// the first line that differs. One small collective while all is well, two more if not. Waits for the device.
void require_same_on_all_ranks(Communicator& wire, Device device, std::string_view what,
                               const std::vector<std::string>& lines);

}  // namespace ldc

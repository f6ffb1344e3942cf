#include "communicators/same_on_all_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

namespace ldc {

int64_t digest(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

namespace {

std::vector<std::string> split(const char* text, size_t size) {
  std::vector<std::string> lines(1);
  for (size_t i = 0; i < size; ++i) {
    if (text[i] == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += text[i];
    }
  }
  return lines;
}

}  // namespace

Tensor collect(Communicator& wire, Device device, const Tensor& mine, std::string_view name) {
  const c10::DeviceGuard guard(device);
  const Tensor in = mine.to(device);
  const Tensor out = at::empty({wire.world_size(), in.numel()}, in.options());
  wire.all_gather({{out, in, name}}).wait();
  return out.cpu();
}

void require_same_on_all_ranks(Communicator& wire, Device device, std::string_view what,
                               const std::vector<std::string>& lines) {
  const int64_t world = wire.world_size();
  if (world == 1) return;
  const PlainTensors plain;
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  const auto options = at::TensorOptions().dtype(c10::kLong);
  Tensor mine = at::empty({2}, options);
  mine.mutable_data_ptr<int64_t>()[0] = digest(text);
  mine.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(text.size());
  const Tensor digests = collect(wire, device, mine, "registration");
  const auto* seen = digests.const_data_ptr<int64_t>();
  const auto differs = [&](int64_t rank) { return seen[2 * rank] != seen[0] || seen[2 * rank + 1] != seen[1]; };
  int64_t other = 1;
  while (other < world && !differs(other)) ++other;
  if (other == world) return;

  int64_t longest = 0;
  for (int64_t rank = 0; rank < world; ++rank) longest = std::max(longest, seen[2 * rank + 1]);
  Tensor padded = at::zeros({longest}, at::TensorOptions().dtype(c10::kByte));
  std::memcpy(padded.mutable_data_ptr(), text.data(), text.size());
  const Tensor texts = collect(wire, device, padded, "registration");
  const auto read = [&](int64_t rank) {
    const auto* begin = static_cast<const char*>(texts.const_data_ptr()) + rank * longest;
    return split(begin, static_cast<size_t>(seen[2 * rank + 1]));
  };
  const std::vector<std::string> first = read(0), second = read(other);
  size_t i = 0;
  while (i < first.size() && i < second.size() && first[i] == second[i]) ++i;
  const auto quote = [&](const std::vector<std::string>& all) {
    return i < all.size() && !all[i].empty() ? all[i] : std::string("nothing more");
  };
  LDC_CHECK_ARG(false, what, " differs between ranks: rank 0 has ", quote(first), "; rank ", other, " has ",
                quote(second), ". Register the same on every rank, in the same order.");
}

}  // namespace ldc

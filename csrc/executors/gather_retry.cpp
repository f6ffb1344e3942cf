// Copies gathered parameters that are not in use to host memory when the device has no memory left.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "executors/gather.h"

namespace ldc {

int64_t GatherEngine::give_back() {
  release_fetched();
  if (const int64_t freed = arena_.free_unused(); freed > 0) return freed;
  // Those that were launched first: in forward they are needed last, and what is still in flight is needed first.
  std::map<int64_t, std::shared_ptr<Group>> groups;
  for (const auto& [id, gathered] : gathered_) groups.emplace(gathered.group->number, gathered.group);
  int64_t freed = 0, away = 0;
  for (const auto& [number, group] : groups) {
    if (freed == 0) freed = send_away(*group);
    if (group->away.defined()) away += group->away.numel();
  }
  stats_.away_peak_bytes = std::max(stats_.away_peak_bytes, away);
  return freed;
}

std::vector<GatherEngine::Gathered*> GatherEngine::members(const Group& group) {
  std::vector<Gathered*> found;
  for (auto& [id, gathered] : gathered_) {
    if (gathered.group.get() == &group) found.push_back(&gathered);
  }
  return found;
}

void GatherEngine::move_views(const std::vector<Gathered*>& gathered, const Tensor& memory) {
  for (Gathered* one : gathered) {
    const Tensor& old = one->full;
    const int64_t start = old.storage_offset() * old.element_size();
    one->full = typed_view(memory, start, old.sizes(), old.scalar_type());
  }
}

int64_t GatherEngine::send_away(Group& group) {
  if (!group.slot || group.slot->window || dry_) return 0;
  complete(group);
  const std::vector<Gathered*> gathered = members(group);
  // Tensors that a program holds keep the storage in use. Ours may have been among them: those are replaced first.
  move_views(gathered, group.slot->bytes);
  if (group.slot->bytes.storage().use_count() != 1 + gathered.size()) return 0;
  const PlainTensors plain;
  int64_t used = 0;  // the slot may be larger
  for (const Gathered* one : gathered) {
    used = std::max(used, (one->full.storage_offset() + one->full.numel()) * one->full.element_size());
  }
  Tensor away = at::empty({used}, group.slot->bytes.options().device(c10::kCPU));
  away.copy_(group.slot->bytes.narrow(0, 0, used));  // the host waits for it, so that the memory can go at once
  move_views(gathered, away);
  group.away = std::move(away);
  stats_.sent_away_bytes += group.slot->capacity();
  arena_.release(std::move(group.slot), current_stream(device_));
  return arena_.free_unused();
}

void GatherEngine::bring_back(Group& group) {
  const PlainTensors plain;
  Arena::Lease slot = arena_.acquire(group.away.numel(), current_stream(device_));
  slot->bytes.narrow(0, 0, group.away.numel()).copy_(group.away);
  move_views(members(group), slot->bytes);
  group.slot = std::move(slot);
  group.away.reset();
}

}  // namespace ldc

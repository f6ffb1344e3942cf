// What is gathered at the edges of a program that a device graph records.
#include <algorithm>
#include <map>

#include "executors/gather.h"

namespace ldc {

bool GatherEngine::is_recorded() const {
  return std::all_of(gathered_.begin(), gathered_.end(), [](const auto& entry) {
    const Group& group = *entry.second.group;
    if (group.away.defined()) return false;
    return !group.slot || group.slot->recorded;  // without a slot it is the shard itself
  });
}

void GatherEngine::fork() {
  order(compute_, current_stream(device_), stream_);
  order(compute_, current_stream(device_), copies_);
}

void GatherEngine::join() {
  for (const auto& [id, gathered] : gathered_) complete(*gathered.group);
  release_fetched();
  order(compute_, stream_, current_stream(device_));
  order(compute_, copies_, current_stream(device_));
  arena_.free_unused();
  for (const auto& [id, gathered] : gathered_) {
    if (gathered.group->slot) gathered.group->slot->recorded = true;
  }
}

GatherEngine::Left GatherEngine::left() const {
  std::map<int64_t, Left::Part> parts;
  for (const auto& [id, gathered] : gathered_) {
    const Group& group = *gathered.group;
    const Tensor bytes = group.slot ? group.slot->bytes : Tensor();  // without a slot: the shard itself
    const Stream stream = group.slot ? group.slot->allocated_on : current_stream(device_);
    auto& part = parts.try_emplace(group.number, Left::Part{bytes, stream, {}}).first->second;
    part.members.push_back({id, gathered.full, gathered.kept});
  }
  Left left;
  left.size = gathered_.size();
  for (auto& [number, part] : parts) left.parts.push_back(std::move(part));
  return left;
}

bool GatherEngine::has(const Left& left) const {
  if (gathered_.size() != left.size) return false;
  for (const Left::Part& part : left.parts) {
    for (const Left::Member& member : part.members) {
      const auto found = gathered_.find(member.id);
      if (found == gathered_.end() || !found->second.full.is_same(member.full)) return false;
    }
  }
  return true;
}

void GatherEngine::restore(const Left& left) {
  gathered_.clear();
  refresh_ = true;
  for (const Left::Part& part : left.parts) {
    auto group = std::make_shared<Group>();
    if (part.bytes.defined()) {
      group->slot = std::make_unique<Arena::Slot>(part.bytes, part.allocated_on, arena_.total());
      group->slot->recorded = true;
    }
    group->waited = true;
    group->resident = static_cast<int64_t>(part.members.size());
    group->number = ++launched_;
    for (const Left::Member& member : part.members) {
      gathered_.emplace(member.id, Gathered{group, member.full, member.kept});
    }
  }
}

void GatherEngine::cancel() {
  for (const auto& [id, gathered] : gathered_) {
    if (gathered.group->slot) gathered.group->slot->user.reset();
  }
  if (fetched_) fetched_->user.reset();
  gathered_.clear();
  fetched_.reset();
  arena_.drop_unused();
  refresh_ = true;
}

}  // namespace ldc

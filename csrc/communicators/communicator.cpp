#include "communicators/communicator.h"

#include <exception>
#include <thread>

namespace ldc {

void abort_together(std::initializer_list<Communicator*> communicators) noexcept {
  std::vector<std::jthread> threads;  // joined at the end
  for (Communicator* communicator : communicators) {
    try {
      threads.emplace_back([communicator] { communicator->abort(); });
    } catch (const std::exception&) {
      communicator->abort();  // there are no threads left: one after another is better than not at all
    }
  }
}

}  // namespace ldc

// Programs that a device graph records.
//
// A graph's replay runs on the device what was queued while it was recorded, on all streams, and nothing on the host. So
// what the engines know must be the same before a replay as it was before the recording, and becomes what it was behind
// it: which parameters are gathered, and where; which gradients are valid; which sums wait. A recording holds both.
//
//   begin()     on all ranks in the same step: nothing is gathered ahead of programs, gradients keep their memory
//   prepare()   before the recording: nothing is in flight, no memory of before is taken up, gradients have theirs
//   fork()      the current stream records: the engines' streams do, too
//   (the program runs: nothing of it reaches the device)
//   join()      everything is behind the current stream again
//   fits(), replayed()   for each replay, the first one included
#pragma once

#include <memory>

#include "executors/gather.h"
#include "executors/reduce.h"

namespace ldc {

class Recording {
 public:
  /// What the engines know at one edge of a program.
  struct Edge {
    GatherEngine::Left gathered;
    WholeGradients::Sums held;
    Ids with_grad;
    bool boundary;  // the optimizer steps after this backward
  };

 private:
  friend class Recorder;
  Edge before, after;
  Stats counted;          // by one run
  int64_t addresses = 0;  // Registry::addresses()
};

class Recorder {
 public:
  Recorder(Registry& registry, GatherEngine& gathers, ReduceEngine& reductions, Stats& stats, const bool& boundary)
      : registry_(registry), gathers_(gathers), reductions_(reductions), stats_(stats), boundary_(boundary) {}

  void begin();
  void prepare();
  void fork();
  std::shared_ptr<Recording> join();
  /// The recording has failed, and its program has not run.
  void cancel();
  /// Whether a replay would find everything as the recording did.
  bool fits(const Recording& recording) const;
  void replayed(const Recording& recording);
  /// There are no recordings any more.
  void forget();

 private:
  Recording::Edge edge() const;
  void restore(const Recording::Edge& edge);

  Registry& registry_;
  GatherEngine& gathers_;
  ReduceEngine& reductions_;
  Stats& stats_;
  const bool& boundary_;
  std::shared_ptr<Recording> recording_;  // the one under way
};

}  // namespace ldc

// What can be turned off to measure what it brings. Python reads the names from the environment
// (kernels/ablations.py) and hands them on.
#pragma once

namespace quire {

enum Switch : int {
  kPrefetch,
  kHugePages,
  kDealing,
  kSpinning,
  kSplitKv,
  kEvenTiles,
  kSharedPages,
  kKvAhead,
  kSharedLoading,
  kOwnRuns,
  kSwitches,
};

bool is_on(Switch which);

}  // namespace quire

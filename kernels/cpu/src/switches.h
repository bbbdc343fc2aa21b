// What can be turned off, to see what it brings or to work around a machine's quirk. Python reads the
// environment (kernels/cpu/switches.py, which has the words for each, in this order) and tells us.
#pragma once

namespace quire {

enum Switch : int {
  kFusedGate,
  kPrefetch,
  kHugePages,
  kDealing,
  kSinglePanels,
  kSpinning,
  kSplitKv,
  kHeadsTogether,
  kEvenTiles,
  kSharedPages,
  kKvAhead,
  kSharedLoading,
  kRowPieces,
  kWideRounding,
  kOwnRuns,
  kSwitches,
};

bool is_on(Switch which);

}  // namespace quire

// The contents of a decode step.
#pragma once

#include "decoder.h"
#include "edits.h"

namespace quire {

}  // namespace quire

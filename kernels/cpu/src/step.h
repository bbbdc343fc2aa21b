// What a decode step is given.
#pragma once

#include "decoder.h"
#include "edits.h"

namespace quire {

}  // namespace quire

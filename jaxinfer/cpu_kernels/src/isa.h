// Which instruction sets there are, and which of them this processor has.
#pragma once

#include "jobs.h"

namespace jaxinfer {

// The kernels of the set with this name, of the best one for "auto"; null if this processor or this
// build does not have it.
const Kernels* kernels_of(const char* name);

// Names of the sets that this processor has, best first, separated by spaces.
const char* isa_names();

}  // namespace jaxinfer

// All kernels of one instruction set. Compiled once for each, with the compiler's flags for it and
// ISA set to its name; nothing but `isa_<name>` is visible outside.
#include "attend_tile.h"

#define JI_NAME_(isa) isa_##isa
#define JI_NAME(isa) JI_NAME_(isa)

namespace jaxinfer {

extern const Kernels JI_NAME(ISA);
const Kernels JI_NAME(ISA) = {
    prepare_row, panels,    store_token,   attend_row,
    ask_for_row, attend_tile, merge_row, scratch_bytes,
};

}  // namespace jaxinfer

// What XLA calls: buffers in, jobs out. Shapes are checked by the Python side when it traces; here
// only what would read or write beyond a buffer.
#include "run.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxinfer {
namespace {

// An optional operand is an empty array where it is absent.
template <class T>
const T* pointer(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

ffi::ErrorOr<Number> number_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return Number::kFloat32;
    case ffi::DataType::BF16:
      return Number::kBfloat16;
    default:
      return ffi::Unexpected(ffi::Error::InvalidArgument("numbers must be float32 or bfloat16"));
  }
}

ffi::Error no_isa(std::string_view name) {
  return ffi::Error::InvalidArgument(
      "this processor does not have the instruction set " + std::string(name));
}

ffi::Error linear(
    ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer norm, ffi::AnyBuffer residual,
    ffi::Result<ffi::AnyBuffer> out, int32_t format, int32_t gate, float eps,
    std::string_view isa) {
  const Kernels* kernels = kernels_of(std::string(isa).c_str());
  if (!kernels) return no_isa(isa);
  ffi::ErrorOr<Number> x_number = number_of(x), out_number = number_of(*out);
  if (x_number.has_error()) return x_number.error();
  if (out_number.has_error()) return out_number.error();
  LinearJob job{};
  job.x = x.untyped_data();
  job.x_number = *x_number;
  job.num_rows = static_cast<int>(x.dimensions()[0]);
  job.num_inputs = static_cast<int>(x.dimensions()[1]);
  job.norm = pointer<float>(norm);
  job.eps = eps;
  job.format = static_cast<Format>(format);
  job.weight = pointer<uint32_t>(weight);
  job.num_groups = static_cast<int>(weight.dimensions()[1]) - kTail;
  job.gate = static_cast<Gate>(gate);
  job.residual = pointer<void>(residual);
  job.out = out->untyped_data();
  job.out_number = *out_number;
  job.num_outputs = static_cast<int>(out->dimensions()[1]);
  int per_word = job.format == Format::kInt8 ? 4 : job.format == Format::kBfloat16 ? 2 : 1;
  int width = job.gate == Gate::kNone ? kLanes : kLanes / 2;
  bool fits = (job.num_inputs + per_word - 1) / per_word == job.num_groups &&
              weight.dimensions()[0] * width >= job.num_outputs && weight.dimensions()[2] == kLanes;
  if (!fits) return ffi::Error::InvalidArgument("x and out do not fit the weight");
  run_linear(job, *kernels, Pool::shared());
  return ffi::Error::Success();
}

ffi::Error attention(
    ffi::AnyBuffer heads, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer page_table,
    ffi::AnyBuffer seq_lens, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_decode_rows,
    ffi::AnyBuffer num_rows, ffi::AnyBuffer sinks, ffi::AnyBuffer slots, ffi::AnyBuffer cosines,
    ffi::AnyBuffer sines, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm,
    ffi::Result<ffi::AnyBuffer> out, float scale, int32_t window, float softcap, bool interleaved,
    float eps, std::string_view isa) {
  const Kernels* kernels = kernels_of(std::string(isa).c_str());
  if (!kernels) return no_isa(isa);
  ffi::ErrorOr<Number> number = number_of(heads), page_number = number_of(k_pages);
  if (number.has_error()) return number.error();
  if (page_number.has_error()) return page_number.error();
  AttentionJob job{};
  job.num_tokens = static_cast<int>(heads.dimensions()[0]);
  job.num_kv_heads = static_cast<int>(k_pages.dimensions()[1]);
  job.group_stride = static_cast<int>(heads.dimensions()[2]);
  job.head_dim = static_cast<int>(heads.dimensions()[3]);
  job.slots = pointer<int32_t>(slots);
  // New keys and values stand behind their queries.
  job.group = job.group_stride - (job.slots ? 2 : 0);
  job.heads = heads.untyped_data();
  job.out = out->untyped_data();
  job.number = *number;
  job.cosines = pointer<float>(cosines);
  job.sines = pointer<float>(sines);
  job.rotary_half = job.cosines ? static_cast<int>(cosines.dimensions()[1]) : 0;
  job.interleaved = interleaved;
  job.q_norm = pointer<float>(q_norm);
  job.k_norm = pointer<float>(k_norm);
  job.eps = eps;
  job.k_pages = k_pages.untyped_data();
  job.v_pages = v_pages.untyped_data();
  job.page_number = *page_number;
  job.num_pages = static_cast<int>(k_pages.dimensions()[0]);
  job.page_size = static_cast<int>(k_pages.dimensions()[2]);
  job.page_table = pointer<int32_t>(page_table);
  job.pages_per_row = static_cast<int>(page_table.dimensions()[1]);
  job.scale = scale;
  job.window = window;
  job.softcap = softcap;
  job.sinks = pointer<float>(sinks);
  Rows rows{
      pointer<int32_t>(seq_lens), pointer<int32_t>(query_start_loc),
      *pointer<int32_t>(num_decode_rows), *pointer<int32_t>(num_rows)};
  run_attention(job, rows, *kernels, Pool::shared());
  return ffi::Error::Success();
}

// The same with the pages as results that share their operands' memory.
ffi::Error attention_in_place(
    ffi::AnyBuffer heads, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer page_table,
    ffi::AnyBuffer seq_lens, ffi::AnyBuffer query_start_loc, ffi::AnyBuffer num_decode_rows,
    ffi::AnyBuffer num_rows, ffi::AnyBuffer sinks, ffi::AnyBuffer slots, ffi::AnyBuffer cosines,
    ffi::AnyBuffer sines, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm,
    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_k_pages,
    ffi::Result<ffi::AnyBuffer> new_v_pages, float scale, int32_t window, float softcap,
    bool interleaved, float eps, std::string_view isa) {
  bool aliased = k_pages.untyped_data() == new_k_pages->untyped_data() &&
                 v_pages.untyped_data() == new_v_pages->untyped_data();
  if (!aliased) return ffi::Error::Internal("the pages are not updated in place");
  return attention(
      heads, k_pages, v_pages, page_table, seq_lens, query_start_loc, num_decode_rows, num_rows,
      sinks, slots, cosines, sines, q_norm, k_norm, out, scale, window, softcap, interleaved, eps,
      isa);
}

}  // namespace
}  // namespace jaxinfer

// The only names that the library shows.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_linear, jaxinfer::linear,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()  // x
        .Arg<ffi::AnyBuffer>()  // weight
        .Arg<ffi::AnyBuffer>()  // norm
        .Arg<ffi::AnyBuffer>()  // residual
        .Ret<ffi::AnyBuffer>()  // out
        .Attr<int32_t>("format")
        .Attr<int32_t>("gate")
        .Attr<float>("eps")
        .Attr<std::string_view>("isa"));

#define JI_ATTENTION_ARGUMENTS                       \
  Arg<ffi::AnyBuffer>()       /* heads */            \
      .Arg<ffi::AnyBuffer>()  /* k_pages */          \
      .Arg<ffi::AnyBuffer>()  /* v_pages */          \
      .Arg<ffi::AnyBuffer>()  /* page_table */       \
      .Arg<ffi::AnyBuffer>()  /* seq_lens */         \
      .Arg<ffi::AnyBuffer>()  /* query_start_loc */  \
      .Arg<ffi::AnyBuffer>()  /* num_decode_rows */  \
      .Arg<ffi::AnyBuffer>()  /* num_rows */         \
      .Arg<ffi::AnyBuffer>()  /* sinks */            \
      .Arg<ffi::AnyBuffer>()  /* slots */            \
      .Arg<ffi::AnyBuffer>()  /* cosines */          \
      .Arg<ffi::AnyBuffer>()  /* sines */            \
      .Arg<ffi::AnyBuffer>()  /* q_norm */           \
      .Arg<ffi::AnyBuffer>()  /* k_norm */           \
      .Ret<ffi::AnyBuffer>()  /* out */

#define JI_ATTENTION_ATTRIBUTES       \
  Attr<float>("scale")                \
      .Attr<int32_t>("window")        \
      .Attr<float>("softcap")         \
      .Attr<bool>("interleaved")      \
      .Attr<float>("eps")             \
      .Attr<std::string_view>("isa")

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_attention, jaxinfer::attention,
    ffi::Ffi::Bind().JI_ATTENTION_ARGUMENTS.JI_ATTENTION_ATTRIBUTES);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxinfer_attention_in_place, jaxinfer::attention_in_place,
    ffi::Ffi::Bind()
        .JI_ATTENTION_ARGUMENTS
        .Ret<ffi::AnyBuffer>()  // new_k_pages
        .Ret<ffi::AnyBuffer>()  // new_v_pages
        .JI_ATTENTION_ATTRIBUTES);

extern "C" const char* jaxinfer_isa_names() { return jaxinfer::isa_names(); }

#pragma GCC visibility pop

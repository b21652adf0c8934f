// Sums of products of FP16 or BF16 numbers on a CPU without arithmetic for that type: the kernels that
// amp_patch/casts/cpu_half.py describes, in C++.
//
// A kernel for `BackendSelect` is called below autograd, so autograd saves the low operands and differentiates the op
// by torch's own formula. It is also called above the kernels of all devices. Torch has no kernel at this key for any
// op of the list.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state.h"

namespace amp_patch {
namespace [[gnu::visibility("hidden")]] casts {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// ---------------------------------------------------------------------------------------------------------------------
// FP32 memory for one call, reused from the thread's last calls, because that memory is in the cache. Writing an
// operand into new memory, and reading it there, would cost as much as a small GEMM.

constexpr int64_t KEPT = 8LL << 20;  // elements that a thread keeps, 32 MiB: no cache holds more

class Pool {
 public:
  // Returns a one-dimensional tensor of `elements` or more: the smallest kept buffer that is large enough, or a new
  // one.
  Tensor take(int64_t elements) {
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->numel() >= elements && (best == kept_.end() || it->numel() <= best->numel())) best = it;
    }
    if (best == kept_.end()) {
      const c10::InferenceMode ordinary(false);  // a later call may run outside of this inference mode
      return at::empty({elements}, at::kFloat);
    }
    Tensor taken = std::move(*best);
    kept_.erase(best);
    return taken;
  }

  void give(Tensor buffer) {
    if (buffer.storage().use_count() != 1) return;  // a result uses the memory, or an error left it on the stack
    kept_.push_back(std::move(buffer));
    int64_t all = 0;
    for (const Tensor& one : kept_) all += one.numel();
    while (all > KEPT) {  // the oldest goes first
      all -= kept_.front().numel();
      kept_.erase(kept_.begin());
    }
  }

  void clear() { kept_.clear(); }

 private:
  std::vector<Tensor> kept_;
};

thread_local Pool pool;
thread_local uint64_t emulated_calls = 0;

// A buffer taken from the thread's pool, and an FP32 tensor of the wanted shape in its memory.
struct Wide {
  Wide(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t elements)
      : buffer(pool.take(elements)), tensor(buffer.as_strided(sizes, strides)) {}
  Wide(Wide&&) = default;
  Wide(const Wide&) = delete;
  ~Wide() {
    tensor.reset();
    if (buffer.defined()) pool.give(std::move(buffer));
  }

  // A buffer with the shape of `low`, and with its strides if they leave no gaps: GEMMs and convolutions choose their
  // algorithm by strides.
  static Wide like(const Tensor& low) {
    if (low.is_non_overlapping_and_dense()) return {low.sizes(), low.strides(), low.numel()};
    return {low.sizes(), c10::contiguous_strides(low.sizes()), low.numel()};
  }

  // An FP32 copy of `low`, with its strides or in their order.
  static Wide of(const Tensor& low) {
    Wide wide(low.sizes(), at::infer_dense_strides(low.sizes(), low.strides()), low.numel());
    wide.tensor.copy_(low);
    return wide;
  }

  Tensor buffer, tensor;
};

// The number of elements in the product of two matrices, or of two batches of matrices.
int64_t elements_of_product(const Tensor& a, const Tensor& b) {
  if (a.dim() < 2 || b.dim() < 2) return 0;
  return a.numel() / std::max<int64_t>(a.size(-1), 1) * b.size(-1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Large products of two matrices

constexpr int64_t LARGE = 4LL << 20;  // elements, 16 MiB in FP32
constexpr int64_t BLOCK = 1LL << 20;
// Rows or columns of a block: with fewer, reading the other operand takes most of the time.
constexpr int64_t LEAST = 64;

// Returns `a` @ `b`, plus `bias` of one dimension if it is defined, rounded once. Blocks of the larger operand, and of
// the result, are in FP32 at a time. FP32 copies of both would be the peak of a language model's memory.
Tensor product_in_blocks(const Tensor& a, const Tensor& b, const Tensor& bias) {
  const bool rows = a.numel() >= b.numel();
  const Tensor& cut = rows ? a : b;
  const Wide other = Wide::of(rows ? b : a);
  const Tensor wide = bias.defined() ? bias.to(at::kFloat) : bias;
  const int64_t dim = rows ? 0 : 1, length = cut.size(dim);
  const int64_t most = std::max({a.size(1), rows ? b.size(1) : a.size(0), int64_t(1)});
  const int64_t step = std::max(BLOCK / most, LEAST);
  Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  for (int64_t start = 0; start < length; start += step) {
    const int64_t count = std::min(step, length - start);
    const Wide part = Wide::of(cut.narrow(dim, start, count));
    Tensor into = result.narrow(dim, start, count);
    Wide sum(into.sizes(), c10::contiguous_strides(into.sizes()), into.numel());
    const Tensor &left = rows ? part.tensor : other.tensor, &right = rows ? other.tensor : part.tensor;
    if (!bias.defined()) {
      at::mm_out(sum.tensor, left, right);
    } else {
      at::addmm_out(sum.tensor, rows ? wide : wide.narrow(0, start, count), left, right);
    }
    into.copy_(sum.tensor);
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

class Product final : public c10::OperatorKernel {
 public:
  Product(const c10::OperatorHandle& op, std::vector<int64_t> fp32_results, bool mixes, bool writes_out, bool anywhere)
      : fp32_results_(std::move(fp32_results)), mixes_(mixes), anywhere_(anywhere) {
    const auto& arguments = op.schema().arguments();
    is_mm_ = writes_out && op.schema().name() == "aten::mm";
    is_addmm_ = writes_out && op.schema().name() == "aten::addmm";
    is_convolution_backward_ = op.schema().name() == "aten::convolution_backward";
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype") dtype_ = i;
    }
    if (writes_out) out_ = c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "out");
  }

  // Bit i: calls on LOW[i] are emulated. Shared with `Registered`, which adds types while calls are made.
  std::shared_ptr<std::atomic<unsigned>> types = std::make_shared<std::atomic<unsigned>>(0);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    const auto low = type_of(stack->data() + first, arguments.size());
    if (!low.has_value()) return op.redispatchBoxed(keys & BELOW, stack);
    RECORD_FUNCTION("amp_patch::emulated", {});  // shows in users' profiles which ops are emulated
    ++emulated_calls;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (const auto large = large_product(stack->data() + first); large.defined()) {
      torch::jit::drop(*stack, arguments.size());
      stack->emplace_back(large);
      return;
    }
    std::vector<Wide> wide;
    wide.reserve(arguments.size() + 1);
    std::vector<std::pair<Tensor, size_t>> written;  // an argument, and the index in `wide` of its replacement
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[first + i];
      if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().scalar_type() != *low) continue;
      const Tensor given = value.toTensor();
      wide.push_back(Wide::like(given));
      if (!arguments[i].is_out()) wide.back().tensor.copy_(given);
      const auto* alias = arguments[i].alias_info();
      if (alias != nullptr && alias->isWrite()) written.emplace_back(given, wide.size() - 1);
      value = wide.back().tensor;
    }
    if (out_.has_value() && wide.size() >= 2) {  // else an operand is no low tensor, and torch's op raises
      const size_t count = wide.size();
      wide.push_back(Wide({0}, {1}, elements_of_product(wide[count - 2].tensor, wide[count - 1].tensor)));
      stack->emplace_back(wide.back().tensor);  // the op resizes it within the same memory
      out_->redispatchBoxed(keys & BELOW, stack);
    } else {
      const Tensor of_input = is_convolution_backward_ ? gradient_of_input(op, keys, *stack, *low) : Tensor();
      op.redispatchBoxed(keys & BELOW, stack);
      if (of_input.defined()) stack->end()[-3] = of_input;
    }
    const size_t results = stack->size() - op.schema().returns().size();
    for (size_t i = results; i < stack->size(); ++i) round((*stack)[i], i - results, *low, wide, written);
  }

 private:
  static constexpr std::array<ScalarType, 2> LOW{ScalarType::Half, ScalarType::BFloat16};

  // The type to emulate in a call: the one type of all its floating arguments, if it is emulated here; else none.
  std::optional<ScalarType> type_of(const c10::IValue* values, size_t count) const {
    const unsigned emulated = types->load(std::memory_order_relaxed);
    if (emulated == 0) return {};
    std::optional<ScalarType> low;
    for (size_t i = 0; i < count; ++i) {
      if (i == dtype_ && !values[i].isNone()) return {};  // the user chose the type
      if (!values[i].isTensor()) continue;
      const Tensor& given = values[i].toTensor();
      if (!given.defined() || !(given.is_floating_point() || given.is_complex())) continue;
      const auto type = given.scalar_type();
      if (is_low(type) && (!low.has_value() || *low == type)) {
        if (!given.is_cpu() || given.layout() != at::kStrided) return {};
        low = type;
      } else if (!(mixes_ && low.has_value() && type == ScalarType::Float)) {
        return {};  // torch refuses mixed types, or has a kernel for them
      }
    }
    if (!low.has_value() || (emulated & bit(*low)) == 0) return {};
    return anywhere_ || emulates_here(*low) ? low : std::nullopt;
  }

  // The result of a large `mm`, or of an `addmm` with one bias for all rows; undefined for other calls.
  Tensor large_product(const c10::IValue* values) const {
    if (is_addmm_ ? !(values[3].toScalar().equal(1) && values[4].toScalar().equal(1)) : !is_mm_) return {};
    const Tensor bias = is_addmm_ ? values[0].toTensor() : Tensor();
    const Tensor &a = values[is_addmm_].toTensor(), &b = values[is_addmm_ + 1].toTensor();
    if ((bias.defined() && bias.dim() != 1) || a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(0)) return {};
    if (bias.defined() && bias.size(0) != b.size(1)) return {};
    const bool is_large = std::max({a.numel(), b.numel(), a.size(0) * b.size(1)}) > LARGE;
    return is_large ? product_in_blocks(a, b, bias) : Tensor();
  }

  // Computes the first gradient of a `convolution_backward` and rounds it; leaves the others in the mask of `stack`.
  // In one call it would be FP32 beside the memory for the weight's gradient, at the peak of a convnet's training.
  static Tensor gradient_of_input(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack,
                                  ScalarType low) {
    const auto mask = stack.back().toBoolList();
    if (!mask[0] || !(mask[1] || mask[2])) return {};
    torch::jit::Stack alone(stack.end() - static_cast<ptrdiff_t>(op.schema().arguments().size()), stack.end());
    alone.back() = c10::List<bool>({true, false, false});
    stack.back() = c10::List<bool>({false, mask[1], mask[2]});
    op.redispatchBoxed(keys & BELOW, &alone);
    return alone[0].toTensor().to(low);
  }

  void round(c10::IValue& value, size_t index, ScalarType low, const std::vector<Wide>& wide,
             const std::vector<std::pair<Tensor, size_t>>& written) const {
    if (!value.isTensor()) return;
    const Tensor result = value.toTensor();
    if (!result.defined() || result.scalar_type() != ScalarType::Float) return;
    if (std::find(fp32_results_.begin(), fp32_results_.end(), int64_t(index)) != fp32_results_.end()) return;
    for (const auto& [given, at] : written) {
      if (!result.is_same(wide[at].tensor)) continue;
      if (given.sizes() != result.sizes()) given.resize_(result.sizes());
      given.copy_(result);
      value = given;
      return;
    }
    value = result.to(low);
  }

 public:
  static unsigned bit(ScalarType type) { return type == LOW[0] ? 1u : 2u; }

 private:
  std::vector<int64_t> fp32_results_;
  bool mixes_, anywhere_, is_mm_, is_addmm_, is_convolution_backward_;
  size_t dtype_ = size_t(-1);
  std::optional<c10::OperatorHandle> out_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Registration

struct Registered {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__};
  std::unordered_map<std::string, std::shared_ptr<std::atomic<unsigned>>> types;  // by the op's name
};

std::unique_ptr<Registered>& registered() {
  static auto* kernels = new std::unique_ptr<Registered>();  // never destroyed: the dispatcher may be gone by then
  return *kernels;
}

void emulate(const std::string& name, const std::string& overload, std::vector<int64_t> fp32_results, bool mixes,
             bool writes_out, bool anywhere, ScalarType low) {
  auto& kernels = registered();
  if (kernels == nullptr) kernels = std::make_unique<Registered>();
  const std::string address = overload.empty() ? name : name + "." + overload;
  auto& types = kernels->types[address];
  if (types == nullptr) {
    const auto op = c10::Dispatcher::singleton().findSchema({"aten::" + name, overload});
    if (!op.has_value()) return;  // this release of torch lacks the op
    auto kernel = std::make_unique<Product>(*op, std::move(fp32_results), mixes, writes_out, anywhere);
    types = kernel->types;
    kernels->library.impl(address.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  types->fetch_or(Product::bit(low));
}

}  // namespace

void bind_emulation(py::module_& m) {
  m.def("emulate", &emulate);  // the fields of `Product` in cpu_half.py, and a type
  m.def("emulated_calls", [] { return emulated_calls; });
  m.def("free_scratch", [] { pool.clear(); });
  m.def("stop_emulating", [] {
    registered().reset();
    pool.clear();
  });
}

}  // namespace casts
}  // namespace amp_patch

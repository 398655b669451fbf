// The Python module. Everything that comes in is checked here; what lies below trusts its arguments.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "isa.h"
#include "layer.h"

namespace nb = nanobind;
using namespace outrider;

namespace {

using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;
constexpr int64_t kAny = -1;

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

std::string shown(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + (shape[i] == kAny ? std::string("any") : std::to_string(shape[i]));
  return text + "]";
}

// Raises unless the array is contiguous, in main memory, of this type and this shape.
template <class Array>
void check(const Array& a, const char* name, nb::dlpack::dtype type, const char* type_name, const std::vector<int64_t>& shape) {
  if (a.device_type() != nb::device::cpu::value) fail(std::string(name) + " is not in main memory");
  if (a.dtype() != type) fail(std::string(name) + " has another element type than " + type_name);
  std::vector<int64_t> given;
  for (size_t i = 0; i < a.ndim(); i++) given.push_back(static_cast<int64_t>(a.shape(i)));
  bool ok = given.size() == shape.size();
  for (size_t i = 0; ok && i < shape.size(); i++) ok = shape[i] == kAny || shape[i] == given[i];
  if (!ok) fail(std::string(name) + " has shape " + shown(given) + "; expected is " + shown(shape));
  if (std::count(given.begin(), given.end(), 0)) return;  // nothing there: its strides mean nothing
  int64_t step = 1;
  for (size_t i = given.size(); i-- > 0; step *= given[i])
    if (given[i] > 1 && a.stride(i) != step) fail(std::string(name) + " is not contiguous");
}

constexpr nb::dlpack::dtype kHalf = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
constexpr nb::dlpack::dtype kBf16 = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

const float* floats(const In& a, const char* name, const std::vector<int64_t>& shape) {
  check(a, name, nb::dtype<float>(), "fp32", shape);
  return static_cast<const float*>(a.data());
}

float* floats(const Out& a, const char* name, const std::vector<int64_t>& shape) {
  check(a, name, nb::dtype<float>(), "fp32", shape);
  return static_cast<float*>(a.data());
}

const int64_t* integers(const In& a, const char* name, const std::vector<int64_t>& shape) {
  check(a, name, nb::dtype<int64_t>(), "int64", shape);
  return static_cast<const int64_t*>(a.data());
}

int64_t* integers(const Out& a, const char* name, const std::vector<int64_t>& shape) {
  check(a, name, nb::dtype<int64_t>(), "int64", shape);
  return static_cast<int64_t*>(a.data());
}

int64_t length(const In& a) { return a.ndim() ? static_cast<int64_t>(a.shape(0)) : 0; }

std::vector<float> copied(const std::optional<In>& a, const char* name, int64_t n, int64_t padded) {
  std::vector<float> values;
  if (!a) return values;
  const float* p = floats(*a, name, {n});
  values.assign(p, p + n);
  values.resize(static_cast<size_t>(padded));
  return values;
}

Linear linear_of(std::shared_ptr<Weight> weight, const std::optional<In>& bias, const char* name, int64_t n, int64_t k) {
  if (!weight) fail(std::string(name) + " is missing");
  if ((n != kAny && weight->n() != n) || weight->k() != k)
    fail(std::string(name) + " has shape " + shown({weight->n(), weight->k()}) + "; expected is " + shown({n, k}));
  auto padded = copied(bias, name, weight->n(), weight->blocks() * kLanes);
  return {std::move(weight), std::move(padded)};
}

std::shared_ptr<Layer> make_layer(int64_t heads, int64_t kv_heads, int64_t head_dim, double eps, int64_t window, const In& input_norm,
                                  const In& post_norm, std::vector<std::shared_ptr<Weight>> weights, std::vector<std::optional<In>> biases,
                                  const std::optional<In>& q_norm, const std::optional<In>& k_norm) {
  if (heads < 1 || kv_heads < 1 || heads % kv_heads || head_dim < 2 || head_dim % 2 || heads > 65536 || head_dim > 65536)
    fail("heads must be a positive multiple of kv_heads, and head_dim positive and even");
  if (window < 0) fail("window must be 0 (none) or positive");
  if (weights.size() != 7 || biases.size() != 7) fail("a layer has 7 weights and 7 biases: q, k, v, o, gate, up, down");
  const int64_t hidden = length(input_norm), q = heads * head_dim, kv = kv_heads * head_dim;
  auto layer = std::make_shared<Layer>();
  layer->q = linear_of(weights[0], biases[0], "q", q, hidden);
  layer->k = linear_of(weights[1], biases[1], "k", kv, hidden);
  layer->v = linear_of(weights[2], biases[2], "v", kv, hidden);
  layer->o = linear_of(weights[3], biases[3], "o", hidden, q);
  layer->gate = linear_of(weights[4], biases[4], "gate", kAny, hidden);
  const int64_t ffn = layer->gate.weight->n();
  layer->up = linear_of(weights[5], biases[5], "up", ffn, hidden);
  layer->down = linear_of(weights[6], biases[6], "down", hidden, ffn);
  layer->input_norm = copied(input_norm, "input_norm", hidden, hidden);
  layer->post_norm = copied(post_norm, "post_norm", hidden, hidden);
  layer->q_norm = copied(q_norm, "q_norm", head_dim, head_dim);
  layer->k_norm = copied(k_norm, "k_norm", head_dim, head_dim);
  layer->heads = heads;
  layer->kv_heads = kv_heads;
  layer->head_dim = head_dim;
  layer->window = window;
  layer->eps = static_cast<float>(eps);
  return layer;
}

// Keeps the pool's tensors alive.
struct KV {
  Out k, v;
  std::optional<Out> k_scale, v_scale;
  KVView view;
};

std::shared_ptr<KV> make_kv(Out k, Out v, std::optional<Out> k_scale, std::optional<Out> v_scale) {
  const KVFormat format = k.dtype() == nb::dtype<int8_t>() ? KVFormat::i8 : k.dtype() == kHalf ? KVFormat::f16 : k.dtype() == kBf16 ? KVFormat::bf16 : KVFormat::f32;
  const auto type = format == KVFormat::f32 ? nb::dtype<float>() : k.dtype();
  const bool codes = format == KVFormat::i8;
  check(k, "k", type, "fp32, fp16, bf16 or int8", {kAny, kAny, kAny});
  const auto size = [&](size_t i) { return static_cast<int64_t>(k.shape(i)); };
  check(v, "v", type, "fp32, fp16, bf16 or int8, the same as k", {size(0), size(1), size(2)});
  if (codes != k_scale.has_value() || codes != v_scale.has_value()) fail("k and v have scales if they are int8, and only then");
  KVView view = {{k.data(), nullptr}, {v.data(), nullptr}, format, size(0), size(1), size(2)};
  if (codes) {
    view.k.scale = floats(*k_scale, "k_scale", {view.heads, view.slots, view.groups()});
    view.v.scale = floats(*v_scale, "v_scale", {view.heads, view.slots, view.groups()});
  }
  return std::make_shared<KV>(KV{std::move(k), std::move(v), std::move(k_scale), std::move(v_scale), view});
}

// Cosines and sines of one pass, looked at once for all its layers.
struct Rope {
  In cos, sin;
  int64_t rows, half;
};

std::shared_ptr<Rope> make_rope(In cos, In sin) {
  floats(cos, "cos", {kAny, kAny});
  const auto rows = static_cast<int64_t>(cos.shape(0)), half = static_cast<int64_t>(cos.shape(1));
  floats(sin, "sin", {rows, half});
  return std::make_shared<Rope>(Rope{std::move(cos), std::move(sin), rows, half});
}

std::shared_ptr<Plan> make_plan(const In& positions, const In& slots, std::vector<int64_t> cu_rows, std::vector<int64_t> kv_len, const In& tables,
                                std::vector<int64_t> tail_start, const std::optional<In>& ancestors, int64_t block_size) {
  BatchView b{};
  b.rows = length(slots);
  b.seqs = static_cast<int64_t>(kv_len.size());
  b.block_size = block_size;
  b.positions = integers(positions, "positions", {b.rows});
  b.slots = integers(slots, "slots", {b.rows});
  b.block_tables = integers(tables, "block_tables", {b.seqs, kAny});
  b.table_width = static_cast<int64_t>(tables.shape(1));
  if (ancestors) {
    b.ancestors = integers(*ancestors, "ancestors", {b.rows, kAny});
    b.words = static_cast<int64_t>(ancestors->shape(1));
  }
  b.cu_rows = std::move(cu_rows);
  b.kv_len = std::move(kv_len);
  b.tail_start = std::move(tail_start);
  return std::make_shared<Plan>(b);
}

std::shared_ptr<Context> make_context(int threads, const std::optional<std::string>& isa) {
  if (threads < 1 || threads > 256) fail("threads is " + std::to_string(threads) + "; allowed are 1 to 256");
  const Kernels* kernels = isa ? find_kernels(*isa) : available_kernels().front();
  if (!kernels) {
    std::string names;
    for (const Kernels* k : available_kernels()) names += std::string(names.empty() ? "" : ", ") + k->name;
    fail("instruction set '" + *isa + "' is unknown or not to be had here; available are " + names);
  }
  return std::make_shared<Context>(threads, kernels);
}

// Layers with their KV pools, in order; what fits together is checked here, once.
struct Stack {
  std::vector<std::shared_ptr<Layer>> layers;  // kept alive
  std::vector<std::shared_ptr<KV>> kvs;
  std::vector<LayerOn> on;
  int64_t slots, half;  // the smallest pool; columns of cos and sin
};

std::shared_ptr<Stack> make_stack(std::vector<std::shared_ptr<Layer>> layers, std::vector<std::shared_ptr<KV>> kvs) {
  if (layers.empty() || layers.size() != kvs.size()) fail("a stack has one or more layers and a KV pool for each");
  auto stack = std::make_shared<Stack>();
  stack->slots = INT64_MAX;
  for (size_t i = 0; i < layers.size(); i++) {
    if (!layers[i] || !kvs[i]) fail("a layer or its KV pool is missing");
    const Layer& layer = *layers[i];
    const KVView& kv = kvs[i]->view;
    if (kv.heads != layer.kv_heads || kv.dim != layer.head_dim)
      fail("the KV pool has " + std::to_string(kv.heads) + " heads of " + std::to_string(kv.dim) + "; the layer has " +
           std::to_string(layer.kv_heads) + " of " + std::to_string(layer.head_dim));
    if (layer.hidden() != layers[0]->hidden() || layer.head_dim != layers[0]->head_dim) fail("the layers of a stack differ in width");
    stack->slots = std::min(stack->slots, kv.slots);
    stack->on.push_back({&layer, &kv});
  }
  stack->half = layers[0]->head_dim / 2;
  stack->layers = std::move(layers);
  stack->kvs = std::move(kvs);
  return stack;
}

void check_stack(const Stack& stack, Plan& plan) {
  if (plan.max_slot() >= stack.slots)
    fail("slot " + std::to_string(plan.max_slot()) + " is outside the KV pool of " + std::to_string(stack.slots) + " slots");
  for (const LayerOn& one : stack.on) plan.seen(one.layer->window);  // made while the interpreter lock is held
}

// x and y are addresses of contiguous fp32 [plan.rows, hidden] in main memory, which the caller has made sure of: taking
// two tensors apart costs more here than all other checks together.
void layers_call(Context& context, const Stack& stack, Plan& plan, const Rope& rope, uintptr_t x, uintptr_t y) {
  if (rope.rows != plan.rows() || rope.half != stack.half)
    fail("cos and sin have shape " + shown({rope.rows, rope.half}) + "; expected is " + shown({plan.rows(), stack.half}));
  check_stack(stack, plan);
  if (!plan.rows()) return;
  if (!x || !y || x == y) fail("x and y must be two stretches of memory");
  nb::gil_scoped_release release;
  run_layers(context, stack.on, plan, static_cast<const float*>(rope.cos.data()), static_cast<const float*>(rope.sin.data()),
             reinterpret_cast<const float*>(x), reinterpret_cast<float*>(y));
}

std::shared_ptr<Ends> make_ends(std::shared_ptr<Weight> embedding, std::shared_ptr<Weight> head, const In& norm, double eps, const In& inv_freq,
                                double rope_scale) {
  if (!embedding || !head) fail("the embedding or the head is missing");
  if (embedding->k() != head->k()) fail("embedding and head differ in width");
  auto ends = std::make_shared<Ends>();
  ends->norm = copied(norm, "norm", head->k(), head->k());
  ends->inv_freq = copied(inv_freq, "inv_freq", length(inv_freq), length(inv_freq));
  ends->embedding = std::move(embedding);
  ends->head = std::move(head);
  ends->rope_scale = rope_scale;
  ends->eps = static_cast<float>(eps);
  return ends;
}

const int64_t* indices(const In& a, const char* name, int64_t n, int64_t below) {
  const int64_t* p = integers(a, name, {n});
  for (int64_t i = 0; i < n; i++)
    if (p[i] < 0 || p[i] >= below) fail(std::string(name) + " holds " + std::to_string(p[i]) + "; allowed is 0 to " + std::to_string(below - 1));
  return p;
}

void pass_call(Context& context, const Ends& ends, const std::vector<std::shared_ptr<Stack>>& stacks, Plan& plan, const In& ids, const In& wanted,
               const Out& hidden, const Out& logits, const Out& best) {
  const int64_t rows = plan.rows(), n = length(wanted), width = ends.head->k();
  const int64_t *id = indices(ids, "ids", rows, ends.embedding->n()), *row = indices(wanted, "logit_rows", n, rows);
  std::vector<const std::vector<LayerOn>*> layers;
  for (const auto& stack : stacks) {
    if (!stack) fail("a stack is missing");
    if (stack->layers[0]->hidden() != width || stack->half != static_cast<int64_t>(ends.inv_freq.size())) fail("the layers do not fit between embedding and head");
    check_stack(*stack, plan);
    layers.push_back(&stack->on);
  }
  if (layers.empty()) fail("a pass needs layers");
  float* to = floats(hidden, "hidden", {static_cast<int64_t>(layers.size()), rows, width});
  float* out = floats(logits, "logits", {n, ends.head->n()});
  int64_t* top = integers(best, "best", {n});
  if (!rows) return;
  nb::gil_scoped_release release;
  run_pass(context, ends, layers, plan, id, row, n, to, out, top);
}

void linear_call(Context& context, const Weight& weight, const In& x, const std::optional<In>& bias, const Out& y) {
  const int64_t rows = length(x);
  const float* from = floats(x, "x", {rows, weight.k()});
  float* to = floats(y, "y", {rows, weight.n()});
  const std::vector<float> padded = copied(bias, "bias", weight.n(), weight.blocks() * kLanes);
  if (!rows) return;
  nb::gil_scoped_release release;
  run_linear(context, weight, padded.empty() ? nullptr : padded.data(), from, rows, to);
}

void norm_call(Context& context, const In& x, const In& weight, double eps, const Out& y) {
  const int64_t rows = length(x), k = length(weight);
  const float* from = floats(x, "x", {rows, k});
  const float* w = floats(weight, "weight", {k});
  float* to = floats(y, "y", {rows, k});
  nb::gil_scoped_release release;
  run_norm(context, from, w, static_cast<float>(eps), rows, k, to);
}

void embed_call(Context& context, const Weight& table, const In& ids, const Out& y) {
  const int64_t rows = length(ids);
  const int64_t* id = indices(ids, "ids", rows, table.n());
  float* to = floats(y, "y", {rows, table.k()});
  nb::gil_scoped_release release;
  run_embed(context, table, id, rows, to);
}

void rope_call(Context& context, const In& inv_freq, double scale, const In& positions, const Out& cos, const Out& sin) {
  const int64_t half = length(inv_freq), rows = length(positions);
  const float* f = floats(inv_freq, "inv_freq", {half});
  const int64_t* p = integers(positions, "positions", {rows});
  float *c = floats(cos, "cos", {rows, half}), *s = floats(sin, "sin", {rows, half});
  nb::gil_scoped_release release;
  run_rope_table(context, f, half, scale, p, rows, c, s);
}

std::shared_ptr<Weight> pack(const In& w, const std::string& format) {
  const Floats type = w.dtype() == kHalf ? Floats::f16 : w.dtype() == kBf16 ? Floats::bf16 : Floats::f32;
  check(w, "weight", type == Floats::f32 ? nb::dtype<float>() : w.dtype(), "fp32, fp16 or bf16", {kAny, kAny});
  const auto n = static_cast<int64_t>(w.shape(0)), k = static_cast<int64_t>(w.shape(1));
  const void* from = w.data();
  nb::gil_scoped_release release;
  return std::make_shared<Weight>(Weight::from_floats(parse_format(format), type, from, n, k));
}

std::shared_ptr<Weight> pack_gguf(const In& raw, const std::string& stored, int64_t n, int64_t k, const std::string& format) {
  const Format from = parse_format(stored), to = parse_format(format);
  const int64_t group = gguf_group_bytes(from);
  if (k < 1 || k % kGroup) fail("GGUF blocks hold 32 inputs; the weight has " + std::to_string(k));
  check(raw, "raw", nb::dtype<uint8_t>(), "uint8", {n, k / kGroup * group});
  const auto* bytes = static_cast<const uint8_t*>(raw.data());
  nb::gil_scoped_release release;
  return std::make_shared<Weight>(Weight::from_gguf(to, from, bytes, n, k));
}

// The packed bytes themselves; the weight lives as long as they are held.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> packed_bytes(const std::shared_ptr<Weight>& w) {
  return {w->data(), {static_cast<size_t>(w->bytes())}, nb::cast(w)};
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // caches may outlive the interpreter's last sweep
  m.doc() = "Outrider's CPU operations. Use outrider.ops.native.";

  nb::class_<Weight>(m, "Weight")
      .def_prop_ro("format", [](const Weight& w) { return format_name(w.format()); })
      .def_prop_ro("shape", [](const Weight& w) { return nb::make_tuple(w.n(), w.k()); })
      .def_prop_ro("nbytes", &Weight::bytes)
      .def_prop_ro("bytes", &packed_bytes)
      .def("checksum", &Weight::checksum, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Layer>(m, "Layer");
  nb::class_<Rope>(m, "Rope");
  nb::class_<KV>(m, "KV");
  nb::class_<Stack>(m, "Stack").def_prop_ro("hidden", [](const Stack& s) { return s.layers[0]->hidden(); });
  nb::class_<Ends>(m, "Ends")
      .def_prop_ro("vocab", [](const Ends& e) { return e.head->n(); })
      .def_prop_ro("hidden", [](const Ends& e) { return e.head->k(); });
  nb::class_<Plan>(m, "Plan").def_prop_ro("rows", &Plan::rows);
  nb::class_<Context>(m, "Context")
      .def_prop_ro("threads", [](const Context& c) { return c.pool.threads(); })
      .def_prop_ro("isa", [](const Context& c) { return c.kernels->name; });

  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
    return names;
  });
  m.def("context", &make_context, nb::arg("threads"), nb::arg("isa").none() = nb::none());
  m.def("pack", &pack, nb::arg("weight"), nb::arg("format"));
  m.def("pack_gguf", &pack_gguf, nb::arg("raw"), nb::arg("stored"), nb::arg("n"), nb::arg("k"), nb::arg("format"));
  m.def("blank", [](const std::string& format, int64_t n, int64_t k) { return std::make_shared<Weight>(parse_format(format), n, k); },
        nb::arg("format"), nb::arg("n"), nb::arg("k"));
  m.attr("layout") = kLayout;
  m.def("layer", &make_layer, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("eps"), nb::arg("window"), nb::arg("input_norm"),
        nb::arg("post_norm"), nb::arg("weights"), nb::arg("biases"), nb::arg("q_norm").none(), nb::arg("k_norm").none());
  m.def("kv", &make_kv, nb::arg("k"), nb::arg("v"), nb::arg("k_scale").none(), nb::arg("v_scale").none());
  m.def("plan", &make_plan, nb::arg("positions"), nb::arg("slots"), nb::arg("cu_rows"), nb::arg("kv_len"), nb::arg("block_tables"),
        nb::arg("tail_start"), nb::arg("ancestors").none(), nb::arg("block_size"));
  m.def("stack", &make_stack, nb::arg("layers"), nb::arg("kvs"));
  m.def("decoder_layers", &layers_call, nb::arg("context"), nb::arg("stack"), nb::arg("plan"), nb::arg("rope"), nb::arg("x"), nb::arg("y"));
  m.def("ends", &make_ends, nb::arg("embedding"), nb::arg("head"), nb::arg("norm"), nb::arg("eps"), nb::arg("inv_freq"), nb::arg("rope_scale"));
  m.def("forward", &pass_call, nb::arg("context"), nb::arg("ends"), nb::arg("stacks"), nb::arg("plan"), nb::arg("ids"), nb::arg("logit_rows"),
        nb::arg("hidden"), nb::arg("logits"), nb::arg("best"));
  m.def("rope", &make_rope, nb::arg("cos"), nb::arg("sin"));
  m.def("linear", &linear_call, nb::arg("context"), nb::arg("weight"), nb::arg("x"), nb::arg("bias").none(), nb::arg("y"));
  m.def("rms_norm", &norm_call, nb::arg("context"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("y"));
  m.def("embed", &embed_call, nb::arg("context"), nb::arg("table"), nb::arg("ids"), nb::arg("y"));
  m.def("rope_table", &rope_call, nb::arg("context"), nb::arg("inv_freq"), nb::arg("scale"), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"));
}

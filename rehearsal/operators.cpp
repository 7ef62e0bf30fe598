// Operators on "cuda" tensors by torch's CPU kernels. A stand-in for the kernels, not for what torch does around them.
//
// Each operator that has a kernel for CUDA gets one boxed kernel. At the call, it finds the outputs' shapes on the meta device and
// allocates them with torch's caching allocator. It puts an operation on the current stream, which runs the CPU kernel later, on CPU
// tensors over the same memory. The operation owns no tensor: memory that is freed too early is free, as on a GPU.
//
// If the host needs a result (a shape that depends on values, a number), the call waits for the stream, as torch's kernel does.
#include "device.h"

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unistd.h>
#include <string>
#include <unordered_map>

namespace {

using c10::IValue;
using torch::jit::Stack;

// --- where the program is ---------------------------------------------------------------------------------------------------

std::mutex sites_mutex;
std::set<std::string> sites; // A string's address is valid as long as the process.

// Python's own modules, and torch's but for FSDP2's.
bool is_of_library(const std::string& file) {
  if (file.find("/torch/distributed/fsdp/_fully_shard/") != std::string::npos)
    return false;
  return file[0] == '<' || file.find("/site-packages/") != std::string::npos || file.find("/lib/python3.") != std::string::npos;
}

// The innermost frames of the program; in backward, the node that runs.
const char* find_site() {
  std::ostringstream text;
  if (auto node = torch::autograd::get_current_node())
    text << "backward of " << node->name() << "; ";
  if (Py_IsInitialized()) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    int shown = 0;
    for (int depth = 0; frame && depth < 60 && shown < 6; depth++) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      std::string file = PyUnicode_AsUTF8(code->co_filename);
      if (!is_of_library(file)) {
        text << (shown++ ? " < " : "") << file.substr(file.rfind('/') + 1) << ":" << PyFrame_GetLineNumber(frame) << " "
             << PyUnicode_AsUTF8(code->co_name);
      }
      Py_DECREF(code);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    Py_XDECREF(frame);
    PyGILState_Release(state);
  }
  std::string found = text.str();
  std::lock_guard<std::mutex> guard(sites_mutex);
  return sites.insert(found.empty() ? "(no Python frame)" : found).first->c_str();
}

// --- tensors over the same memory -------------------------------------------------------------------------------------------

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined())
    return tensor;
  if (!tensor.is_cuda()) { // It is read at the call, as a kernel's argument is.
    at::Tensor copy = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      copy.unsafeGetTensorImpl()->set_wrapped_number(true); // It takes part in type promotion.
    return copy;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  at::Tensor alias = tensor.numel() == 0
      ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
      : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  if (tensor.is_conj())
    alias = at::_conj(alias);
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda())
    return tensor; // A number, or a small CPU tensor, keeps what it says about type promotion.
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& function) {
  if (value.isTensor())
    return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList())
      list.push_back(function(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      list.push_back(each.has_value() ? std::optional<at::Tensor>(function(*each)) : std::nullopt);
    return list;
  }
  return value;
}

void for_tensors(const IValue& value, const std::function<void(const at::Tensor&)>& function) {
  if (value.isTensor() && value.toTensor().defined())
    function(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList())
      function(each);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      if (each.has_value() && each->defined())
        function(*each);
}

// The memory of a tensor: its rows, or from its first to its last element if it has too many of them.
void add_accesses(std::vector<rehearsal_access>& accesses, const at::Tensor& tensor, int is_write) {
  if (!tensor.is_cuda() || tensor.numel() == 0)
    return;
  char* start = static_cast<char*>(tensor.data_ptr());
  int64_t itemsize = static_cast<int64_t>(tensor.itemsize());
  std::vector<std::pair<int64_t, int64_t>> dims; // (stride, size), the smallest stride first.
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0)
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1; // Elements without a gap.
  size_t outer = 0;
  while (outer < dims.size() && dims[outer].first <= run)
    run = (dims[outer].second - 1) * dims[outer].first + run, outer++;
  int64_t runs = 1;
  for (size_t dim = outer; dim < dims.size(); dim++)
    runs *= dims[dim].second;
  if (runs > 4096) {
    int64_t extent = run;
    for (size_t dim = outer; dim < dims.size(); dim++)
      extent += (dims[dim].second - 1) * dims[dim].first;
    accesses.push_back({start, static_cast<size_t>(extent * itemsize), is_write});
    return;
  }
  for (int64_t number = 0; number < runs; number++) {
    int64_t offset = 0, rest = number;
    for (size_t dim = outer; dim < dims.size(); dim++)
      offset += rest % dims[dim].second * dims[dim].first, rest /= dims[dim].second;
    accesses.push_back({start + offset * itemsize, static_cast<size_t>(run * itemsize), is_write});
  }
}

// --- an operation on a stream -----------------------------------------------------------------------------------------------

// As in a thread of a fresh program: no autograd, no modes, whatever the thread does that runs the operation.
struct PlainDispatch {
  c10::impl::LocalDispatchKeySet before = c10::impl::tls_local_dispatch_key_set();
  bool grad = c10::AutogradState::get_tls_state().get_grad_mode();
  PlainDispatch() {
    c10::impl::LocalDispatchKeySet keys = before;
    keys.included_ = c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    keys.excluded_ = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize});
    c10::impl::_force_tls_local_dispatch_key_set(keys);
    c10::AutogradState::get_tls_state().set_grad_mode(false);
  }
  ~PlainDispatch() {
    c10::AutogradState::get_tls_state().set_grad_mode(grad);
    c10::impl::_force_tls_local_dispatch_key_set(before);
  }
};

struct Launched {
  c10::OperatorHandle op;
  Stack arguments;                                // With CPU tensors.
  std::vector<std::pair<size_t, at::Tensor>> out; // Tensors that get results: (number among the flat results, tensor).
  std::optional<uint64_t> seed;                   // Of the default CPU generator, for an operator that takes none.
};

std::vector<at::Tensor> flat(const Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const IValue& result : results) {
    if (result.isTensor())
      tensors.push_back(result.toTensor());
    else if (result.isTensorList())
      for (const at::Tensor& each : result.toTensorList())
        tensors.push_back(each);
  }
  return tensors;
}

Stack run_on_cpu(Launched& launched) {
  PlainDispatch plain;
  Stack stack = launched.arguments;
  if (!launched.seed.has_value()) {
    launched.op.callBoxed(&stack);
    return stack;
  }
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  at::Tensor state = generator.get_state();
  generator.set_current_seed(*launched.seed);
  launched.op.callBoxed(&stack);
  generator.set_state(state);
  return stack;
}

int run_launched(void* argument) {
  auto* launched = static_cast<Launched*>(argument);
  if (rehearsal_is_null())
    return REHEARSAL_DONE;
  try {
    std::vector<at::Tensor> results = flat(run_on_cpu(*launched));
    PlainDispatch plain;
    for (auto& [number, tensor] : launched->out) {
      const at::Tensor& result = results.at(number);
      TORCH_CHECK(result.sizes() == tensor.sizes(), "the CPU kernel returns shape ", result.sizes(), ", not ", tensor.sizes());
      tensor.copy_(result);
    }
    return REHEARSAL_DONE;
  } catch (const c10::Error& error) {
    rehearsal_fail("%s failed on the device: %s", launched->op.schema().name().c_str(), error.what_without_backtrace());
    return REHEARSAL_FAILED;
  } catch (const std::exception& error) {
    rehearsal_fail("%s failed on the device: %s", launched->op.schema().name().c_str(), error.what());
    return REHEARSAL_FAILED;
  }
}

void drop_launched(void* argument) {
  delete static_cast<Launched*>(argument);
}

// --- random numbers ---------------------------------------------------------------------------------------------------------

uint64_t next_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator(device));
  std::lock_guard<std::mutex> guard(generator->mutex_);
  auto [seed, offset] = generator->philox_engine_inputs(4);
  uint64_t mixed = seed * 0x9E3779B97F4A7C15ull ^ (offset + 0x632BE59BD9B4E019ull);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  return mixed ^ (mixed >> 27);
}

const std::set<std::string> random_without_generator = {"aten::native_dropout", "aten::_fused_dropout"};

// The allocator's lock is held: no lock that another thread holds while it allocates may be taken here, as Python's.
void note_allocation(const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
  using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
  auto* at = reinterpret_cast<void*>(entry.addr_); // NOLINT
  const char* site = PyGILState_Check() ? find_site() : "(a thread without Python)";
  if (entry.action_ == Entry::ALLOC)
    rehearsal_note_allocation(at, entry.size_, site);
  else if (entry.action_ == Entry::FREE_REQUESTED)
    rehearsal_note_free(at, site);
}

// When there is an allocator: at the first operation.
void follow_allocator() {
  const char* check = std::getenv("REHEARSAL_CHECK");
  if (check != nullptr && std::string(check) != "off")
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(note_allocation);
}

// --- the kernel of all operators --------------------------------------------------------------------------------------------

std::mutex notes_mutex;
std::map<std::string, int64_t> synchronous; // Operators whose shapes are not known before they run: calls of each.

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Floating-point operations of matmuls and attention, for the trace.
double work_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  const std::string& name = schema.name();
  auto size = [&](size_t i, int64_t dim) { return static_cast<double>(arguments.at(i).toTensor().size(dim)); };
  auto numel = [&](size_t i) { return static_cast<double>(arguments.at(i).toTensor().numel()); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_grouped_mm")
    return 2 * numel(0) * size(1, -1);
  if (name == "aten::addmm" || name == "aten::baddbmm")
    return 2 * numel(1) * size(2, -1);
  bool is_forward = name == "aten::_scaled_dot_product_flash_attention";
  if (is_forward || name == "aten::_scaled_dot_product_flash_attention_backward") {
    size_t query = is_forward ? 0 : 1; // (batch, heads, tokens, width); the backward's first argument is the gradient.
    size_t causal = is_forward ? 4 : 11;
    double all = 4 * numel(query) * size(query + 1, 2);
    return all * (is_forward ? 1 : 2.5) * (arguments.at(causal).toBool() ? 0.5 : 1);
  }
  return 0;
}

struct StandIn {
  StandIn() { rehearsal_enter(); }
  ~StandIn() { rehearsal_leave(); }
};

void run_on_stream(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  StandIn time;
  const bool is_null = rehearsal_is_null();
  const c10::FunctionSchema& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);

  std::optional<c10::Device> device;
  for (IValue& argument : arguments) {
    for_tensors(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && (!device.has_value() || tensor.dim() > 0)) {
        TORCH_CHECK(
            !device.has_value() || *device == tensor.device() || tensor.dim() == 0,
            "Expected all tensors to be on the same device, but found ", *device, " and ", tensor.device(), " in ", schema.name());
        device = tensor.device();
      }
    });
    if (argument.isDevice() && argument.toDevice().is_cuda() && !device.has_value())
      device = argument.toDevice();
  }
  c10::cuda::OptionalCUDAGuard guard;
  if (device.has_value() && device->has_index())
    guard.set_index(device->index());
  c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  static std::once_flag once;
  std::call_once(once, follow_allocator);
  device = c10::Device(at::kCUDA, stream.device_index());

  // What the operation will see. Generators are drawn from now: the order of calls decides, not that of streams.
  auto* launched = new Launched{op, {}, {}, std::nullopt};
  std::unique_ptr<Launched> owned(launched);
  Stack metas;
  bool has_cpu_input = false;
  {
    PlainDispatch plain;
    for (size_t i = 0; i < count; i++) {
      const IValue& argument = arguments[i];
      bool is_generator = schema.arguments()[i].type()->str().find("Generator") != std::string::npos;
      if (is_generator) {
        auto given = argument.isNone() ? std::optional<at::Generator>() : argument.toOptional<at::Generator>();
        at::Generator generator = at::detail::createCPUGenerator(next_seed(given, device->index()));
        launched->arguments.emplace_back(generator);
        metas.emplace_back();
      } else if (argument.isDevice()) {
        launched->arguments.emplace_back(c10::Device(at::kCPU));
        metas.emplace_back(c10::Device(at::kMeta));
      } else {
        for_tensors(argument, [&](const at::Tensor& tensor) {
          has_cpu_input = has_cpu_input || !tensor.is_cuda();
          TORCH_CHECK(
              tensor.is_cuda() || (tensor.is_cpu() && !writes(schema.arguments()[i])),
              "Expected all tensors to be on the same device, but found ", tensor.device(), " and ", *device, " in ", schema.name());
        });
        if (!is_null)
          launched->arguments.push_back(map_tensors(argument, on_cpu));
        metas.push_back(map_tensors(argument, on_meta));
      }
    }
    if (random_without_generator.count(schema.name()) != 0)
      launched->seed = next_seed(std::nullopt, device->index());
  }

  // The outputs' shapes.
  bool has_shapes = true, is_in_place = false;
  for (const c10::Argument& argument : schema.arguments())
    is_in_place = is_in_place || writes(argument);
  for (const c10::Argument& result : schema.returns())
    has_shapes = has_shapes && (is_null || result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                result.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  if (has_shapes) {
    PlainDispatch plain;
    Stack run = metas;
    try {
      op.callBoxed(&run);
      metas.insert(metas.end(), run.begin(), run.end());
    } catch (const c10::NotImplementedError&) {
      has_shapes = false;
    } catch (pybind11::error_already_set& error) { // Of a meta kernel in Python.
      pybind11::gil_scoped_acquire gil;
      if (!error.matches(PyExc_NotImplementedError))
        throw;
      has_shapes = false;
    }
  }

  std::vector<rehearsal_access> accesses;
  Stack results;
  if (has_shapes) {
    size_t number = 0;
    // An output that is given may have to grow.
    for (size_t i = 0; i < count; i++)
      if (writes(schema.arguments()[i]) && arguments[i].isTensor() && schema.arguments()[i].is_out()) {
        at::Tensor tensor = arguments[i].toTensor(), meta = metas[i].toTensor();
        if (tensor.defined() && tensor.sizes() != meta.sizes()) {
          at::native::resize_output(tensor, meta.sizes());
          PlainDispatch plain;
          if (!is_null)
            launched->arguments[i] = on_cpu(tensor);
        }
      }
    for (size_t r = 0; r < schema.returns().size(); r++) {
      const IValue& meta = metas[count + r];
      const c10::AliasInfo* alias = schema.returns()[r].alias_info();
      if (alias != nullptr) { // It is one of the arguments.
        for (size_t i = 0; i < count; i++)
          if (schema.arguments()[i].alias_info() != nullptr && *schema.arguments()[i].alias_info() == *alias) {
            results.push_back(arguments[i]);
            break;
          }
        number += meta.isTensor() ? 1 : meta.toTensorList().size();
        continue;
      }
      auto made = [&](const at::Tensor& shape) {
        at::Tensor tensor;
        if (shape.defined()) {
          PlainDispatch plain;
          tensor = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(*device));
          if (!is_null)
            launched->out.emplace_back(number, on_cpu(tensor));
          add_accesses(accesses, tensor, 1);
        }
        number++;
        return tensor;
      };
      results.push_back(map_tensors(meta, made));
    }
  }
  for (size_t i = 0; i < count; i++)
    for_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!schema.arguments()[i].is_out())
        add_accesses(accesses, tensor, 0);
      if (writes(schema.arguments()[i]))
        add_accesses(accesses, tensor, 1);
    });

  if (has_shapes) {
    if (rehearsal_is_traced())
      rehearsal_set_work(work_of(schema, arguments));
    rehearsal_launch(stream.stream(), schema.name().c_str(), run_launched, drop_launched, owned.release(), accesses.data(),
                     accesses.size(), 0);
    C10_CUDA_CHECK(cudaPeekAtLastError());
    stack->insert(stack->end(), results.begin(), results.end());
    return;
  }

  TORCH_CHECK(!is_null, schema.name(), " needs values, and the null device has none");
  // The host needs the result: wait for the stream, and run.
  {
    std::lock_guard<std::mutex> notes(notes_mutex);
    synchronous[schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name())]++;
  }
  static auto nothing = [](void*) { return static_cast<int>(REHEARSAL_DONE); };
  rehearsal_launch(stream.stream(), schema.name().c_str(), nothing, nullptr, nullptr, accesses.data(), accesses.size(), 0);
  c10::cuda::stream_synchronize(stream.stream());
  Stack found = run_on_cpu(*launched);
  for (size_t r = 0; r < schema.returns().size(); r++) {
    const c10::AliasInfo* alias = schema.returns()[r].alias_info();
    bool is_argument = false;
    for (size_t i = 0; alias != nullptr && i < count && !is_argument; i++)
      if (schema.arguments()[i].alias_info() != nullptr && *schema.arguments()[i].alias_info() == *alias) {
        at::Tensor tensor = arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor();
        const at::Tensor cpu = arguments[i].isTensor() ? launched->arguments[i].toTensor() : at::Tensor();
        if (tensor.defined() && tensor.sizes() != cpu.sizes()) { // An output that has grown.
          at::native::resize_output(tensor, cpu.sizes());
          tensor.copy_(cpu);
        }
        results.push_back(arguments[i]);
        is_argument = true;
      }
    if (!is_argument)
      results.push_back(map_tensors(found[r], [&](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.to(*device) : tensor;
      }));
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

// --- operators of their own -------------------------------------------------------------------------------------------------

// Between devices, and where a copy is one memcpy, torch's own code runs. Other copies are a kernel.
at::Tensor& copy_(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  bool is_kernel = self.is_cuda() && src.is_cuda() && self.device() == src.device() && self.numel() > 0;
  if (is_kernel && self.sizes() == src.sizes() && self.strides() == src.strides() && self.dtype() == src.dtype() &&
      self.is_conj() == src.is_conj() && self.is_neg() == src.is_neg() && self.is_non_overlapping_and_dense())
    is_kernel = false;
  if (!is_kernel)
    return at::native::copy_(self, src, non_blocking);
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{self, src, non_blocking};
  run_on_stream(op, keys, &stack);
  return self;
}

std::vector<std::unique_ptr<torch::Library>> libraries;

// That kernels are overridden is what this file is for.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

int64_t install(c10::List<std::string> names) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  rehearsal_set_site(find_site);
  libraries.push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__));
  torch::Library& library = *libraries.back();
  for (const std::string& name : names)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  library.impl("copy_", TORCH_FN(copy_));
  return static_cast<int64_t>(names.size());
}

c10::Dict<std::string, int64_t> synchronous_calls() {
  c10::Dict<std::string, int64_t> calls;
  std::lock_guard<std::mutex> notes(notes_mutex);
  for (const auto& [name, count] : synchronous)
    calls.insert(name, count);
  return calls;
}

std::vector<int64_t> counts(bool reset) {
  uint64_t found[REHEARSAL_COUNTERS];
  rehearsal_counts(found, reset);
  return std::vector<int64_t>(found, found + REHEARSAL_COUNTERS);
}

// Where a tensor lies in device memory: the process, its file of device memory, and the offset there.
std::vector<int64_t> where(const at::Tensor& tensor) {
  int64_t offset = rehearsal_offset(tensor.data_ptr(), tensor.nbytes());
  TORCH_CHECK(offset >= 0, "the tensor is not in one allocation of a device");
  return {getpid(), rehearsal_memory_file(), offset};
}

// A tensor like another one, in the device memory of another process.
at::Tensor peer(const at::Tensor& like, int64_t process, int64_t file, int64_t offset) {
  char* memory = rehearsal_peer_memory(static_cast<int>(process), static_cast<int>(file));
  TORCH_CHECK(memory != nullptr, "the memory of process ", process, " cannot be mapped");
  return at::for_blob(memory + offset, like.sizes()).options(like.options()).target_device(like.device()).make_tensor();
}

// Of each entry: kind, stream, ranks, on, number, host_ns, read, written, work.
std::tuple<std::vector<std::string>, at::Tensor> traced() {
  const rehearsal_entry* entries;
  size_t count = rehearsal_traced(&entries);
  std::vector<std::string> names;
  at::Tensor numbers = at::empty({static_cast<int64_t>(count), 9}, at::kDouble);
  double* to = numbers.data_ptr<double>();
  for (size_t i = 0; i < count; i++) {
    const rehearsal_entry& it = entries[i];
    names.emplace_back(it.name);
    for (double value : {static_cast<double>(it.kind), static_cast<double>(it.stream), static_cast<double>(it.ranks),
                         static_cast<double>(it.on), static_cast<double>(it.number), static_cast<double>(it.host_ns), it.read,
                         it.written, it.work})
      *to++ = value;
  }
  return {names, numbers};
}

TORCH_LIBRARY(rehearsal, m) {
  m.def("where(Tensor tensor) -> int[]", where);
  m.def("peer(Tensor like, int process, int file, int offset) -> Tensor", peer);
  m.def("install(str[] names) -> int", install);
  m.def("synchronous_calls() -> Dict(str, int)", synchronous_calls);
  m.def("counts(bool reset) -> int[]", counts);
  m.def("stand_in_ns() -> int", [] { return static_cast<int64_t>(rehearsal_stand_in_ns()); });
  m.def("trace(bool on) -> ()", [](bool on) { rehearsal_trace(on); });
  m.def("traced() -> (str[], Tensor)", traced);
  m.def("reports() -> int", [] { return static_cast<int64_t>(rehearsal_reports()); });
}

} // namespace

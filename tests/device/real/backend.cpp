// A PrivateUse1 accelerator for tests: device memory is host memory, and streams are threads that run late.
//
// Device pointers carry a bit that makes them invalid on the host. Freed memory is poisoned in stream order and used
// again. Kernels are those of the CPU: operators that write to given tensors are queued, all others wait.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
using Task = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr auto kType = DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 5;  // of a device: the default stream, and a pool that hands out the others in turn
constexpr uintptr_t kTag = uintptr_t{1} << 62;
constexpr int kPoison = 0xCC;

enum SideStreams { kPool, kDefault, kRefused };

std::atomic<bool> forked{false};
std::atomic<int> side_streams{kPool};
std::atomic<double> delay{0};
std::atomic<int> pending{0}, refuse{0}, kinds[3];  // of copies: host to device, back, other
thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};

void pause(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// -- defects

struct Defects {
  std::mutex mutex;
  std::string text;

  void add(const std::string& line) {
    std::lock_guard<std::mutex> lock(mutex);
    text += line + "\n";
  }
};
Defects& defects = *new Defects;  // globals stay: detached threads outlive the end of main

// -- streams and events

struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void reach() {
    std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Point> last;

  std::shared_ptr<Point> point() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool closed = false;

  void set(bool value) {
    std::lock_guard<std::mutex> lock(mutex);
    closed = value;
    changed.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return !closed; });
  }
};
Gate& gate = *new Gate;

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool started = false, running = false;
  std::atomic<int> copies_queued{0}, copies_done{0};

  void push(Task task) {
    TORCH_CHECK(!forked, "a forked child cannot use the devices of its parent");
    std::lock_guard<std::mutex> lock(mutex);
    if (!started) std::thread([this] { run(); }).detach();
    started = true;
    tasks.push_back(std::move(task));
    changed.notify_all();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return tasks.empty() && !running;
  }

  void run() {
    at::set_num_threads(1);
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        running = false;
        changed.wait(lock, [this] { return !tasks.empty(); });
        running = true;
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      gate.pass();
      try {
        task();
      } catch (const std::exception& error) {
        defects.add(std::string("a kernel failed: ") + error.what());
      }
    }
  }
};
Queue (&queues)[kDevices][kStreams] = *new Queue[1][kDevices][kStreams];

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }

Stream stream_of(DeviceIndex device, int64_t id) { return Stream(Stream::UNSAFE, Device(kType, device), id); }

Stream stream_here(Device device) { return stream_of(index_of(device), current_stream[index_of(device)]); }

Queue& queue(const Stream& stream) { return queues[stream.device_index()][stream.id()]; }

std::shared_ptr<Point> record(const Stream& stream) {
  auto point = std::make_shared<Point>();
  queue(stream).push([point] { point->reach(); });
  return point;
}

void wait(const Stream& stream, std::shared_ptr<Point> point) {
  queue(stream).push([point] { point->wait(); });
}

void launch(const Stream& stream, Task task) {
  pending++;
  queue(stream).push([task] {
    struct Count {
      ~Count() { pending--; }
    } count;
    pause(delay);
    task();
  });
}

// -- host storages of finished copies; a queueing thread frees them, for that may need Python's lock

struct Trash {
  std::mutex mutex;
  std::vector<c10::Storage> storages;

  void add(c10::Storage storage) {
    std::lock_guard<std::mutex> lock(mutex);
    storages.push_back(std::move(storage));
  }
  void empty() {
    std::vector<c10::Storage> old;
    std::lock_guard<std::mutex> lock(mutex);
    old.swap(storages);
  }
};
Trash& trash = *new Trash;

// -- device memory

void* on_host(const void* pointer) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) & ~kTag); }

struct Block {
  void* host;
  size_t nbytes;
  Stream stream;
};

struct Memory : c10::Allocator {
  std::mutex mutex;
  std::map<std::tuple<DeviceIndex, int64_t, size_t>, std::vector<Block*>> free_blocks;

  c10::DataPtr allocate(size_t nbytes) override {
    Device device(kType, current_device);
    if (nbytes == 0) return {nullptr, device};
    TORCH_CHECK(!forked, "a forked child cannot use the devices of its parent");
    TORCH_CHECK_WITH(OutOfMemoryError, refuse == 0 || --refuse > 0, "out of device memory");
    Block* block = take(stream_here(device), (nbytes + 63) / 64 * 64);
    auto* pointer = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block->host) | kTag);
    return {pointer, block, &Memory::give, device};
  }

  Block* take(const Stream& stream, size_t nbytes);
  static void give(void* context);

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(on_host(to), on_host(from), nbytes);
  }
};
Memory& memory = *new Memory;

Block* Memory::take(const Stream& stream, size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& blocks = free_blocks[{stream.device_index(), stream.id(), nbytes}];
  if (!blocks.empty()) {
    Block* block = blocks.back();
    blocks.pop_back();
    return block;
  }
  void* host = std::aligned_alloc(64, nbytes);
  std::memset(host, kPoison, nbytes);
  return new Block{host, nbytes, stream};
}

void Memory::give(void* context) {
  if (forked) return;
  auto* block = static_cast<Block*>(context);
  queue(block->stream).push([block] { std::memset(block->host, kPoison, block->nbytes); });
  std::lock_guard<std::mutex> lock(memory.mutex);
  memory.free_blocks[{block->stream.device_index(), block->stream.id(), block->nbytes}].push_back(block);
}

REGISTER_ALLOCATOR(kType, &memory)

// -- page-locked memory

struct Pinned : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> areas;

  c10::DataPtr allocate(size_t nbytes) override {
    auto* area = static_cast<char*>(std::malloc(nbytes ? nbytes : 1));
    std::memset(area, kPoison, nbytes);
    std::lock_guard<std::mutex> lock(mutex);
    areas[area] = nbytes;
    return {area, area, &Pinned::give, Device(DeviceType::CPU)};
  }

  static void give(void* area);

  bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = areas.upper_bound(static_cast<const char*>(data));
    return after != areas.begin() && data < std::prev(after)->first + std::prev(after)->second;
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
Pinned& pinned = *new Pinned;

void Pinned::give(void* area) {
  if (forked) return;
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.areas.erase(static_cast<char*>(area));
  std::free(area);
}

// -- torch's view of the devices

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return stream_here(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    TORCH_CHECK(side_streams != kRefused, "this device makes no streams");
    if (side_streams == kDefault) return getDefaultStream(device);  // as MPS does
    static std::atomic<int> made[kDevices];
    return stream_of(index_of(device), 1 + made[index_of(device)]++ % (kStreams - 1));
  }
  Stream exchangeStream(Stream stream) const override {
    return stream_of(stream.device_index(), std::exchange(current_stream[stream.device_index()], stream.id()));
  }
  bool queryStream(const Stream& stream) const override { return queue(stream).idle(); }
  void synchronizeStream(const Stream& stream) const override { ::record(stream)->wait(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<std::shared_ptr<Point>> points;
    for (int64_t id = 0; id < kStreams; id++) points.push_back(::record(stream_of(device, id)));
    for (auto& point : points) point->wait();
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto*& found = reinterpret_cast<Event*&>(*event);
    if (!found) found = new Event;
    std::lock_guard<std::mutex> lock(found->mutex);
    found->last = ::record(stream);
  }
  void block(void* event, const Stream& stream) const override {
    wait(stream, static_cast<Event*>(event)->point());
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->point()->query(); }
  void synchronizeEvent(void* event) const override { static_cast<Event*>(event)->point()->wait(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard);

// No `override`: older versions of torch lack some of these functions.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return !forked; }
  DeviceIndex deviceCount() const { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const { Guard().setDevice({kType, device}); }
  DeviceIndex getCurrentDevice() const { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const {
    return Guard().exchangeDevice({kType, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const { return pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const { return &pinned; }
};

// -- operators

// Return a CPU tensor over the same memory. It does not own the memory.
at::Tensor host_view(const at::Tensor& tensor) {
  c10::InferenceMode off(false);
  auto options = at::TensorOptions().dtype(tensor.dtype());
  auto view = at::from_blob(on_host(tensor.unsafeGetTensorImpl()->data()), tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor empty_strided_or(at::IntArrayRef size, std::optional<at::IntArrayRef> stride,
                            std::optional<at::ScalarType> dtype, std::optional<Device> device,
                            std::optional<at::MemoryFormat> format) {
  auto target = c10::device_or_default(device);
  auto before = std::exchange(current_device, index_of(target));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto type = c10::dtype_or_default(dtype);
  try {
    at::Tensor made = stride ? at::detail::empty_strided_generic(size, *stride, &memory, keys, type)
                             : at::detail::empty_generic(size, &memory, keys, type, format);
    current_device = before;
    return made;
  } catch (...) {
    current_device = before;
    throw;
  }
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return empty_strided_or(size, {}, dtype, device, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_strided_or(size, stride, dtype, device, {});
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  auto storage = self.storage();
  if (nbytes > storage.nbytes()) {
    Guard().synchronizeStream(stream_here(self.device()));
    auto before = std::exchange(current_device, self.device().index());
    auto larger = memory.allocate(nbytes);
    current_device = before;
    if (storage.nbytes()) memory.copy_data(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  trash.empty();
  auto source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  bool from = source.is_privateuseone(), to = target.is_privateuseone();
  auto stream = stream_here((from ? source : target).device()), other = stream_here((to ? target : source).device());
  if (other != stream) wait(stream, record(other));
  std::optional<c10::Storage> host;
  if (!from || !to) host = (from ? target : source).storage();
  bool locked = host && pinned.has((from ? target : source).unsafeGetTensorImpl()->data());
  kinds[from && to ? 2 : from]++;
  auto* lane = &queue(stream);
  lane->copies_queued++;
  launch(stream, [lane, view = host_view(target), values = host_view(source), host, locked]() mutable {
    view.copy_(values);
    lane->copies_done++;
    if (!host) return;
    if (!locked && host->use_count() == 1) defects.add("host memory was freed before it was copied");
    trash.add(std::move(*host));
  });
  if (other != stream) wait(other, record(stream));
  if (!non_blocking && host) Guard().synchronizeStream(stream);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// Whether an operator does nothing but write to tensors that are passed, as fill_() and add.out do. Empty ones may have
// to grow.
bool only_writes(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  size_t written = 0;
  for (size_t n = 0; n < arguments.size(); n++) {
    const auto* alias = schema.arguments()[n].alias_info();
    if (arguments[n].isList() && !arguments[n].isTensorList()) {
      if (arguments[n].toListRef().size() && !arguments[n].toListRef()[0].isInt()) return false;
    }
    if (!alias) continue;
    if (!alias->isWrite() || !arguments[n].isTensor() || !arguments[n].toTensor().is_privateuseone()) return false;
    if (arguments[n].toTensor().numel() == 0) return false;
    written++;
  }
  return written && written == schema.returns().size();
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  if (!only_writes(schema, arguments)) return at::native::cpu_fallback(op, stack);
  auto view = [](const at::Tensor& tensor) { return tensor.is_privateuseone() ? host_view(tensor) : tensor; };
  torch::jit::Stack inner, results;
  for (size_t n = 0; n < arguments.size(); n++) {
    const auto& value = arguments[n];
    if (value.isTensor() && value.toTensor().defined()) {
      inner.emplace_back(view(value.toTensor()));
      if (schema.arguments()[n].alias_info()) results.push_back(value);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const auto& each : value.toTensorVector()) views.push_back(view(each));
      inner.emplace_back(views);
    } else {
      inner.push_back(value);
    }
  }
  launch(stream_here(results[0].toTensor().device()), [op, inner]() mutable { op.callBoxed(&inner); });
  torch::jit::drop(*stack, arguments.size());
  for (auto& each : results) stack->push_back(each);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// torch would resolve the bits first, which takes a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

// -- for Python, by ctypes

extern "C" {

void late_init() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
}
void late_delay(double seconds) { delay = seconds; }
void late_hold() { gate.set(true); }
void late_release() { gate.set(false); }
void late_side_streams(int kind) { side_streams = kind; }
void late_refuse(int number) { refuse = number; }
int late_pending() { return pending; }
int late_copies(int kind) { return kinds[kind].exchange(0); }
const char* late_defects() {
  std::lock_guard<std::mutex> lock(defects.mutex);
  return strdup(std::exchange(defects.text, "").c_str());
}
// Keep the current stream busy until another one has finished a copy, or some time after one was queued.
void late_busy(double after, double at_most) {
  auto* own = &queue(stream_here(Guard().getDevice()));
  auto others = [own](std::atomic<int> Queue::* count) {
    int total = -(own->*count);
    for (auto& device : queues)
      for (auto& each : device) total += each.*count;
    return total;
  };
  int queued = others(&Queue::copies_queued), done = others(&Queue::copies_done);
  own->push([=] {
    auto begin = Clock::now();
    auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    double end = at_most;
    bool seen = false;
    while (others(&Queue::copies_done) == done && seconds() < end) {
      if (!seen && others(&Queue::copies_queued) != queued) end = std::min(end, seconds() + after), seen = true;
      pause(0.001);
    }
  });
}
}

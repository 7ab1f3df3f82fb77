/* The hand-written part of the stand-ins for the CUDA libraries: whatever ONNX Runtime's CUDA provider asks of
 * them that needs an answer and not only success. Device memory is host memory, and kernels compute nothing. Every
 * function that is not here is generated (cuda_stand_ins.py), weak, and returns 0. Types are those of CUDA 13's ABI
 * on Linux x86-64. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *stream_t;
typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared_bytes; stream_t stream; } launch_config;

enum error {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_KERNEL_IMAGE = 209, ILLEGAL_STATE = 401,
  CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_IMPLICIT = 906,
};
enum copy_kind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Errors: the last one of a thread is kept, for ONNX Runtime asks for it and clears it. */
static _Thread_local int last_error;
static int fail(enum error error) { return last_error = error; }
int cudaPeekAtLastError(void) { return last_error; }
int cudaGetLastError(void) { int error = last_error; last_error = OK; return error; }
const char *cudaGetErrorName(int error) {
  switch (error) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case ILLEGAL_STATE: return "cudaErrorIllegalState";
    case CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "cudaErrorStreamCaptureInvalidated";
    case CAPTURE_UNMATCHED: return "cudaErrorStreamCaptureUnmatched";
    case NO_KERNEL_IMAGE: return "cudaErrorNoKernelImageForDevice";
    case CAPTURE_IMPLICIT: return "cudaErrorStreamCaptureImplicit";
    default: return "unknown";
  }
}
const char *cudaGetErrorString(int error) {
  return error == OUT_OF_MEMORY ? "out of memory" : cudaGetErrorName(error);
}
const char *cublasGetStatusName(int status) { return "stand-in"; }
const char *cublasGetStatusString(int status) { return "stand-in"; }
const char *cudnnGetErrorString(int status) { return "stand-in"; }
void cudnnGetLastErrorString(char *message, size_t size) { if (size) *message = 0; }

/* Counts and trace. The names go along, so that the reader cannot take one field for another. */
#define COUNTS(X) \
  X(kernel_launches) X(library_calls) X(graph_launches) X(captured) X(captures) X(illegal_during_capture) \
  X(mallocs) X(frees) X(host_mallocs) X(copies) X(bytes_to_device) X(bytes_to_host) X(bytes_on_device) \
  X(memsets) X(synchronizations) X(bytes_allocated) X(peak_bytes)
#define AS_FIELD(name) name,
#define AS_TEXT(name) #name " "
enum count { COUNTS(AS_FIELD) FIELDS };
const char stand_in_count_names[] = COUNTS(AS_TEXT);
long long stand_in_counts[FIELDS];

static void note(enum count field, const char *prefix, const char *name, long long amount) {
  static FILE *trace;
  static int asked;
  pthread_mutex_lock(&lock);
  const char *path = asked ? NULL : getenv("QWEN_STAND_IN_TRACE");
  asked = 1;
  if (path && *path) trace = fopen(path, "w");
  stand_in_counts[field]++;
  if (trace) { fprintf(trace, "%s%s %lld\n", prefix, name, amount); fflush(trace); }
  pthread_mutex_unlock(&lock);
}
static void add(enum count field, long long amount) {
  pthread_mutex_lock(&lock);
  stand_in_counts[field] += amount;
  pthread_mutex_unlock(&lock);
}

/* Handles are opaque, but must differ: a stream is told from another by its address. Never freed, they are few. */
int stand_in_new_handle(void **handle) { *handle = calloc(1, 256); return OK; }

/* Stream capture. One at a time: a driver allows more, ONNX Runtime does not ask for it. Work on another stream that
 * an event joins to the capture is taken for work outside of it. */
static struct { stream_t stream; int active, invalid, mode; pthread_t thread; } capture;
enum { GLOBAL, THREAD_LOCAL, RELAXED };

static int capturing(stream_t stream) { return capture.active && stream == capture.stream; }

/* What a driver refuses while a capture goes on: it returns an error, and the capture is lost. */
static int refuse(const char *name, enum error error) {
  note(illegal_during_capture, "illegal:", name, 1);
  capture.invalid = 1;
  return fail(error);
}
static int barred(const char *name) {
  if (!capture.active || capture.mode == RELAXED) return OK;
  if (capture.mode == THREAD_LOCAL && !pthread_equal(capture.thread, pthread_self())) return OK;
  return refuse(name, CAPTURE_UNSUPPORTED);
}
int cudaStreamBeginCapture(stream_t stream, int mode) {
  if (!stream) return fail(CAPTURE_UNSUPPORTED);  /* as for the default stream of a driver */
  if (capture.active) return fail(ILLEGAL_STATE);
  capture.stream = stream; capture.mode = mode; capture.thread = pthread_self();
  capture.invalid = 0; capture.active = 1;
  return OK;
}
int cudaStreamEndCapture(stream_t stream, void **graph) {
  *graph = NULL;
  if (!capturing(stream)) return fail(CAPTURE_UNMATCHED);
  capture.active = 0;
  return capture.invalid ? fail(CAPTURE_INVALIDATED) : stand_in_new_handle(graph);
}
int cudaStreamIsCapturing(stream_t stream, int *status) {
  *status = capturing(stream) ? 1 + capture.invalid : 0;
  return OK;
}
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
  if (!graph) return fail(INVALID_VALUE);
  note(captures, "", "cudaGraphInstantiate", 1);
  return stand_in_new_handle(executable);
}
int cudaGraphLaunch(void *executable, stream_t stream) {
  if (!executable) return fail(INVALID_VALUE);
  note(graph_launches, "", "cudaGraphLaunch", 1);
  return OK;
}

/* Kernels: the provider registers the address of a host function with the kernel's name when it is loaded, tens of
 * thousands of them. The address serves as the kernel's handle too. */
enum { SLOTS = 1 << 18 };
static struct { const void *host; const char *name; } kernels[SLOTS];
static unsigned slot_of(const void *host) {
  unsigned slot = ((uintptr_t)host >> 4) * 2654435761u % SLOTS;
  while (kernels[slot].host && kernels[slot].host != host) slot = (slot + 1) % SLOTS;
  return slot;
}
static void register_kernel(const void *host, const char *name) {
  static int used;
  unsigned slot = slot_of(host);
  if (!kernels[slot].host && ++used > SLOTS / 2) { fputs("stand-ins: SLOTS is too small\n", stderr); abort(); }
  kernels[slot].host = host;
  kernels[slot].name = name;
}
void __cudaRegisterFunction(void **module, const void *host, char *device, const char *name) {
  register_kernel(host, name);
}
void **__cudaRegisterFatBinary(void *binary) { static void *module; return &module; }
int __cudaGetKernel(const void **kernel, const void *host) { *kernel = host; return OK; }
int cudaLibraryLoadData(void **library) { return stand_in_new_handle(library); }
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  stand_in_new_handle(kernel);
  register_kernel(*kernel, strdup(name));
  return OK;
}
static int launch(const void *kernel, stream_t stream) {
  const char *name = kernels[slot_of(kernel)].name;
  if (!name) name = "unregistered";
  if (getenv("QWEN_STAND_IN_FAIL_LAUNCHES")) return fail(NO_KERNEL_IMAGE);
  if (!stream && capture.active && capture.mode == GLOBAL) return refuse(name, CAPTURE_IMPLICIT);
  if (capturing(stream)) note(captured, "captured:", name, 1);
  else note(kernel_launches, "", name, 1);
  return OK;
}
int __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, stream_t stream) {
  return launch(kernel, stream);
}
int cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, stream_t stream) {
  return launch(kernel, stream);
}
int cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                stream_t stream) {
  return launch(kernel, stream);
}
int cudaLaunchKernelExC(const launch_config *config, const void *kernel, void **arguments) {
  return launch(kernel, config->stream);
}
/* kernel<<<...>>>: the caller pushes the configuration, and the host function pops it to launch with. */
static _Thread_local launch_config pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, stream_t stream) {
  pushed = (launch_config){grid, block, shared, stream};
  return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, stream_t *stream) {
  *grid = pushed.grid; *block = pushed.block; *shared = pushed.shared_bytes; *stream = pushed.stream;
  return OK;
}
int cudaLaunchHostFunc(stream_t stream, void (*function)(void *), void *argument) {
  if (capturing(stream)) note(captured, "captured:", "cudaLaunchHostFunc", 1);
  else function(argument);  /* it frees what a copy read: without it memory would grow */
  return OK;
}
int cudaFuncGetAttributes(void *attributes, const void *kernel) {
  struct { size_t shared, constant, local; int threads, registers, ptx, binary; } of = {0, 0, 0, 1024, 32, 90, 90};
  memset(attributes, 0, 144);
  memcpy(attributes, &of, sizeof of);
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 1; return OK; }

/* Calls of cuBLAS and cuDNN that compute. Their stream is the handle's; during a capture it is the captured one. */
int stand_in_library_call(const char *name) {
  if (capture.active) note(captured, "captured:", name, 1);
  else note(library_calls, "", name, 1);
  return OK;
}
/* One algorithm, for ONNX Runtime refuses to multiply with none. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *algorithms, int *found) {
  memset(algorithms, 0, 96);
  *found = 1;
  return OK;
}
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return OK; }
size_t cudnnGetVersion(void) { return 91300; }
int cudnnGetReductionIndicesSize(void *handle, void *reduction, void *a, void *c, size_t *size) {
  *size = 0;
  return OK;
}
int cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *a, void *c, size_t *size) {
  *size = 0;
  return OK;
}
int cudnnBackendCreateDescriptor(int kind, void **descriptor) { return stand_in_new_handle(descriptor); }

/* Device memory. Every allocation is known, so that an address can be told to be the device's or not. It is filled
 * with 0xFF (NaN as f16, bf16 and f32): a driver gives no zeros either, and who relies on them is found out. Another
 * byte, QWEN_STAND_IN_FILL, is for a program that would stop at NaN, for whatever is computed keeps it. */
#define TOTAL_BYTES ((size_t)143771 << 20)
static struct allocation { char *start; size_t size; struct allocation *next; } *allocations;

static int on_device(const void *address, size_t size) {
  pthread_mutex_lock(&lock);
  struct allocation *at = allocations;
  while (at && !((char *)address >= at->start && (char *)address + size <= at->start + at->size)) at = at->next;
  pthread_mutex_unlock(&lock);
  return at != NULL;
}
int cudaMalloc(void **address, size_t size) {
  if (barred("cudaMalloc")) return CAPTURE_UNSUPPORTED;
  const char *limit = getenv("QWEN_STAND_IN_FAIL_MALLOC_ABOVE");
  size_t allowed = limit && *limit ? strtoull(limit, NULL, 10) : TOTAL_BYTES;
  *address = NULL;
  if (!size) return OK;
  if (stand_in_counts[bytes_allocated] + size > allowed) return fail(OUT_OF_MEMORY);
  struct allocation *made = malloc(sizeof *made);
  char *start = aligned_alloc(256, (size + 255) / 256 * 256);
  if (!start) { free(made); return fail(OUT_OF_MEMORY); }
  const char *fill = getenv("QWEN_STAND_IN_FILL");
  memset(start, fill && *fill ? atoi(fill) : 0xFF, size);
  note(mallocs, "", "cudaMalloc", size);
  pthread_mutex_lock(&lock);
  *made = (struct allocation){start, size, allocations};
  allocations = made;
  long long now = stand_in_counts[bytes_allocated] += size;
  if (now > stand_in_counts[peak_bytes]) stand_in_counts[peak_bytes] = now;
  pthread_mutex_unlock(&lock);
  *address = start;
  return OK;
}
int cudaFree(void *address) {
  if (barred("cudaFree")) return CAPTURE_UNSUPPORTED;
  if (!address) return OK;
  pthread_mutex_lock(&lock);
  struct allocation **at = &allocations, *gone;
  while (*at && (*at)->start != address) at = &(*at)->next;
  if ((gone = *at)) { *at = gone->next; stand_in_counts[bytes_allocated] -= gone->size; }
  pthread_mutex_unlock(&lock);
  if (!gone) return fail(INVALID_VALUE);
  note(frees, "", "cudaFree", gone->size);
  free(gone->start);
  free(gone);
  return OK;
}
int cudaMallocFromPoolAsync(void **address, size_t size, void *pool, stream_t stream) {
  return cudaMalloc(address, size);
}
int cudaFreeAsync(void *address, stream_t stream) { return cudaFree(address); }
int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  memset(value, 0, attribute < 4 ? 4 : 8);  /* the first three are flags */
  return OK;
}
int cudaMemGetInfo(size_t *available, size_t *total) {
  *total = TOTAL_BYTES;
  *available = TOTAL_BYTES - stand_in_counts[bytes_allocated];
  return OK;
}
int cudaHostAlloc(void **address, size_t size, unsigned flags) {
  if (barred("cudaHostAlloc")) return CAPTURE_UNSUPPORTED;
  note(host_mallocs, "", "cudaHostAlloc", size);
  *address = aligned_alloc(256, (size + 255) / 256 * 256);
  return *address || !size ? OK : fail(OUT_OF_MEMORY);
}
int cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
int cudaFreeHost(void *address) { free(address); return OK; }
int cudaPointerGetAttributes(void *attributes, const void *address) {
  int device = on_device(address, 1);
  struct { int type, device; const void *on_device, *on_host; } of = {2, 0, address, NULL};
  if (!device) of.type = 0, of.device = -2, of.on_device = NULL, of.on_host = address;
  memset(attributes, 0, 88);
  memcpy(attributes, &of, sizeof of);
  return OK;
}

/* Copies. A driver knows the device's addresses and refuses a copy whose ends are not where `kind` says. */
static int copy(void *to, const void *from, size_t pitch_to, size_t pitch_from, size_t width, size_t rows,
                int kind, stream_t stream, int waits) {
  static const char *const names[] = {"copy-on-host", "copy-to-device", "copy-to-host", "copy-on-device"};
  if (!width || !rows) return OK;
  size_t size = width * rows, last = rows - 1;
  int to_device = on_device(to, pitch_to * last + width), from_device = on_device(from, pitch_from * last + width);
  if (kind == BY_ADDRESS) kind = to_device + 2 * from_device;
  if (kind < 0 || kind > BY_ADDRESS || (kind & 1) > to_device || (kind >> 1) > from_device)
    return fail(INVALID_VALUE);
  if (waits && barred(names[kind])) return CAPTURE_UNSUPPORTED;
  int recorded = !waits && capturing(stream);
  if (capture.active && !waits && (kind == HOST_TO_DEVICE || kind == DEVICE_TO_HOST))
    /* A driver may record it, with the host's address: a replay would read or write what lies there by then. */
    note(illegal_during_capture, "illegal:", names[kind], size);
  if (recorded) { note(captured, "captured:", names[kind], size); return OK; }
  for (size_t row = 0; row < rows; row++)
    memmove((char *)to + row * pitch_to, (const char *)from + row * pitch_from, width);
  if (kind == HOST_TO_HOST) return OK;
  note(copies, "", names[kind], size);
  add(kind == HOST_TO_DEVICE ? bytes_to_device : kind == DEVICE_TO_HOST ? bytes_to_host : bytes_on_device, size);
  return OK;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  return copy(to, from, 0, 0, size, 1, kind, NULL, 1);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, stream_t stream) {
  return copy(to, from, 0, 0, size, 1, kind, stream, 0);
}
int cudaMemcpy2DAsync(void *to, size_t pitch_to, const void *from, size_t pitch_from, size_t width, size_t rows,
                      int kind, stream_t stream) {
  return copy(to, from, pitch_to, pitch_from, width, rows, kind, stream, 0);
}
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size) { memset(to, 0, size); return OK; }
int cudaMemsetAsync(void *address, int value, size_t size, stream_t stream) {
  if (size && !on_device(address, size)) return fail(INVALID_VALUE);
  if (capturing(stream)) { note(captured, "captured:", "cudaMemset", size); return OK; }
  memset(address, value, size);
  note(memsets, "", "cudaMemset", size);
  return OK;
}
int cudaMemset(void *address, int value, size_t size) {
  return barred("cudaMemset") ? CAPTURE_UNSUPPORTED : cudaMemsetAsync(address, value, size, NULL);
}

/* Streams and events: all work is done when it is asked for, and waiting is only counted. */
static int waited(const char *name) { note(synchronizations, "", name, 1); return OK; }
int cudaStreamSynchronize(stream_t stream) {
  int legal = !capture.active || (stream && !capturing(stream));
  return legal ? waited("cudaStreamSynchronize") : refuse("cudaStreamSynchronize", CAPTURE_UNSUPPORTED);
}
int cudaDeviceSynchronize(void) {
  return capture.active ? refuse("cudaDeviceSynchronize", CAPTURE_UNSUPPORTED) : waited("cudaDeviceSynchronize");
}
int cudaEventSynchronize(void *event) {
  return barred("cudaEventSynchronize") ? CAPTURE_UNSUPPORTED : waited("cudaEventSynchronize");
}
int cudaEventElapsedTime(float *milliseconds) { *milliseconds = 0; return OK; }

/* The device: what an H200 says of itself. Offsets are those of cudaDeviceProp, 1008 bytes, in CUDA 13's headers. */
enum { SHARED = 49152, SHARED_OPTIN = 232448, SHARED_SM = 233472, REGISTERS = 65536, L2 = 60 << 20, SMS = 132 };
int cudaGetDeviceProperties(char *properties, int device) {
  static const struct { int offset, size; size_t value; } fields[] = {
    /* totalGlobalMem */
    {288, 8, TOTAL_BYTES},
    /* sharedMemPerBlock, regsPerBlock, warpSize */
    {296, 8, SHARED}, {304, 4, REGISTERS}, {308, 4, 32},
    /* maxThreadsPerBlock, maxThreadsDim */
    {320, 4, 1024}, {324, 4, 1024}, {328, 4, 1024}, {332, 4, 64},
    /* maxGridSize */
    {336, 4, 2147483647}, {340, 4, 65535}, {344, 4, 65535},
    /* totalConstMem, major, minor */
    {352, 8, 65536}, {360, 4, 9}, {364, 4, 0},
    /* multiProcessorCount, canMapHostMemory */
    {384, 4, SMS}, {392, 4, 1},
    /* concurrentKernels, asyncEngineCount, unifiedAddressing */
    {560, 4, 1}, {584, 4, 3}, {588, 4, 1},
    /* memoryBusWidth, l2CacheSize */
    {592, 4, 6144}, {596, 4, L2},
    /* threads, shared memory, registers of an SM */
    {604, 4, 2048}, {624, 8, SHARED_SM}, {632, 4, REGISTERS},
    /* cooperativeLaunch, sharedMemPerBlockOptin, blocks of an SM */
    {668, 4, 1}, {672, 8, SHARED_OPTIN}, {688, 4, 32},
    /* reservedSharedMemPerBlock, memoryPoolsSupported */
    {696, 8, 1024}, {720, 4, 1},
  };
  memset(properties, 0, 1008);
  strcpy(properties, "stand-in for an H200");
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    memcpy(properties + fields[i].offset, &fields[i].value, fields[i].size);
  return OK;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  static const int values[][2] = {
    /* As above; the numbers are cudaDeviceAttr's. */
    {1, 1024}, {2, 1024}, {5, 2147483647}, {8, SHARED}, {10, 32}, {12, REGISTERS}, {16, SMS}, {38, L2},
    {39, 2048}, {75, 9}, {76, 0}, {81, SHARED_SM}, {82, REGISTERS}, {95, 1}, {97, SHARED_OPTIN}, {106, 32},
    {111, 1024}, {115, 1},
  };
  *value = 0;
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) if (values[i][0] == attribute) *value = values[i][1];
  return OK;
}
int cudaGetDeviceCount(int *count) { *count = 1; return OK; }
int cudaGetDevice(int *device) { *device = 0; return OK; }
int cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return OK; }
int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags,
                                     int *found) {
  *entry = dlsym(RTLD_DEFAULT, name);
  *found = *entry ? 0 : 1;
  return OK;
}

/* libcudart.so.13: the CUDA runtime's functions that torch's libraries need, on the streams and the memory of this folder.
 *
 * What is not stood in for says so, and returns cudaErrorNotSupported: it never does nothing and succeeds.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady)
        last_error = error;
    return error;
}

static cudaError_t not_stood_in(const char *what)
{
    fprintf(stderr, "rehearsed: %s has no stand-in\n", what);
    return result(cudaErrorNotSupported);
}

#define NOT_STOOD_IN(name, arguments) \
    cudaError_t name arguments { return not_stood_in(#name); }

/* --- devices ------------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return result(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= device_count())
        return result(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

enum { MULTIPROCESSORS = 16, THREADS = 2048, SHARED_MEMORY = 227 << 10 };

static int capability(void)
{
    const char *given = getenv("REHEARSAL_CAPABILITY"); /* 90 for 9.0. */
    return given ? atoi(given) : 90;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    if (device < 0 || device >= device_count())
        return result(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "rehearsed GPU (no hardware)");
    memcpy(properties->uuid.bytes, "rehearsed-gpu-00", 16);
    properties->uuid.bytes[15] = (char)('0' + device);
    properties->totalGlobalMem = device_total();
    properties->major = capability() / 10, properties->minor = capability() % 10;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->maxThreadsPerMultiProcessor = THREADS;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024, properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff, properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->warpSize = 32;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = SHARED_MEMORY, properties->sharedMemPerMultiprocessor = SHARED_MEMORY + 1024;
    properties->l2CacheSize = 50 << 20;
    properties->memPitch = 0x7fffffff;
    properties->textureAlignment = 512, properties->texturePitchAlignment = 32;
    properties->pciBusID = device + 1;
    properties->concurrentKernels = properties->unifiedAddressing = properties->canMapHostMemory = 1;
    properties->streamPrioritiesSupported = properties->asyncEngineCount = 1;
    properties->hostRegisterSupported = properties->cooperativeLaunch = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess)
        return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    default: *value = 0; /* A capability that this device does not have. */
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize(void)
{
    lock();
    rehearsal_count(REHEARSAL_SYNCHRONIZATIONS);
    trace_host_wait(NULL, 0);
    cudaError_t error = run_all();
    check_host_waits(NULL, NULL);
    unlock();
    return result(error);
}

/* --- errors -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = failure() ? cudaErrorLaunchFailure : last_error; /* A failure stays, as on a GPU. */
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return failure() ? cudaErrorLaunchFailure : last_error; }

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotPermitted: return "cudaErrorNotPermitted";
    default: return "cudaErrorUnknown";
    }
}

const char *cudaGetErrorString(cudaError_t error)
{
    if (error == cudaErrorLaunchFailure && failure())
        return failure();
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

/* --- memory -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **at, size_t nbytes)
{
    lock();
    rehearsal_count(REHEARSAL_MALLOCS);
    cudaError_t error = device_malloc(at, nbytes, current_device);
    unlock();
    return result(error);
}

cudaError_t cudaFree(void *at)
{
    if (!at)
        return cudaSuccess;
    lock();
    rehearsal_count(REHEARSAL_FREES);
    trace_host_wait(NULL, 0);
    cudaError_t error = run_all(); /* cudaFree waits for the device. */
    check_host_waits(NULL, NULL);
    size_t nbytes;
    void *base = allocation_base(at, &nbytes);
    if (base)
        check_forget(base, nbytes);
    if (error == cudaSuccess)
        error = device_free(at);
    unlock();
    return result(error);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    lock();
    *total = device_total();
    *free_bytes = *total - device_used(current_device);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **at, size_t nbytes, unsigned flags)
{
    if (posix_memalign(at, 4096, nbytes ? nbytes : 1) != 0)
        return result(cudaErrorMemoryAllocation);
    lock();
    host_register(*at, nbytes, true);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **at, size_t nbytes) { return cudaHostAlloc(at, nbytes, 0); }

cudaError_t cudaFreeHost(void *at)
{
    lock();
    cudaError_t error = run_all();
    check_host_waits(NULL, NULL);
    if (error == cudaSuccess)
        error = host_unregister(at);
    unlock();
    return result(error);
}

cudaError_t cudaHostRegister(void *at, size_t nbytes, unsigned flags)
{
    lock();
    cudaError_t error = host_register(at, nbytes, false);
    unlock();
    return error;
}

cudaError_t cudaHostUnregister(void *at)
{
    lock();
    cudaError_t error = host_unregister(at);
    unlock();
    return result(error);
}

cudaError_t cudaHostGetDevicePointer(void **device_at, void *at, unsigned flags)
{
    *device_at = at;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *at)
{
    lock();
    int device = device_of(at);
    bool is_pinned = device < 0 && host_is_pinned(at);
    unlock();
    memset(attributes, 0, sizeof *attributes);
    attributes->type = device >= 0 ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = device >= 0 ? device : is_pinned ? 0 : -2;
    attributes->devicePointer = device >= 0 || is_pinned ? (void *)at : NULL;
    attributes->hostPointer = is_pinned ? (void *)at : NULL;
    return cudaSuccess;
}

typedef struct {
    int process, file;
    int64_t offset;
    size_t nbytes;
} ipc_handle;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at)
{
    ipc_handle inside = {getpid(), rehearsal_memory_file(), 0, 0};
    lock();
    void *base = allocation_base(at, &inside.nbytes);
    unlock();
    if (!base)
        return result(cudaErrorInvalidValue);
    inside.offset = rehearsal_offset(base, inside.nbytes);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &inside, sizeof inside);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t handle, unsigned flags)
{
    ipc_handle inside;
    memcpy(&inside, &handle, sizeof inside);
    char *memory = rehearsal_peer_memory(inside.process, inside.file);
    if (!memory)
        return result(cudaErrorInvalidValue);
    *at = memory + inside.offset;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *at) { return cudaSuccess; }

/* --- copies -------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *to;
    const char *from;
    size_t nbytes, rows, to_pitch, from_pitch;
    int value;
    bool is_skipped;
    char staged[];
} copy;

static int run_copy(void *argument)
{
    copy *it = argument;
    if (it->is_skipped)
        return REHEARSAL_DONE;
    for (size_t row = 0; row < it->rows; row++) {
        if (it->from)
            memmove(it->to + row * it->to_pitch, it->from + row * it->from_pitch, it->nbytes);
        else
            memset(it->to + row * it->to_pitch, it->value, it->nbytes);
    }
    return REHEARSAL_DONE;
}

static cudaError_t copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t nbytes, size_t rows,
                             cudaStream_t handle, bool is_synchronous)
{
    if (nbytes == 0 || rows == 0)
        return cudaSuccess;
    lock();
    bool to_host = device_of(to) < 0, from_host = device_of(from) < 0;
    /* Pageable memory: the driver stages what is read before it returns, and the host waits for what is written. */
    bool is_staged = from_host && !host_is_pinned(from), waits = to_host && !host_is_pinned(to);
    unlock();
    size_t extent = from_pitch * (rows - 1) + nbytes;
    copy *it = malloc(sizeof *it + (is_staged ? extent : 0));
    *it = (copy){to, from, nbytes, rows, to_pitch, from_pitch, 0, false};
    if (is_staged)
        it->from = memcpy(it->staged, from, extent);
    if (rehearsal_is_null() && !(to_host && from_host)) {
        /* A few numbers move: the host may read what it has written, as the flags that ranks compare. */
        bool is_small = to_host != from_host && nbytes * rows <= 4096;
        it->is_skipped = !is_small && !to_host;
        it->from = is_small || !to_host ? it->from : NULL; /* Else the host reads zero. */
    }
    rehearsal_access accesses[2] = {{from, extent, 0}, {to, to_pitch * (rows - 1) + nbytes, 1}};
    rehearsal_count(REHEARSAL_COPIES);
    uint64_t number = rehearsal_launch(handle, "memcpy", run_copy, free, it, accesses + is_staged, 2u - is_staged, 0);
    if (!waits && !is_synchronous)
        return result(failure() ? cudaErrorLaunchFailure : cudaSuccess);
    lock();
    cudaStream_t stream = stream_of(handle);
    trace_host_wait(stream, number);
    cudaError_t error = run_until(stream, number);
    check_host_waits(stream, NULL);
    unlock();
    return result(error);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return copy_rows(to, nbytes, from, nbytes, nbytes, 1, stream, false);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind)
{
    return copy_rows(to, nbytes, from, nbytes, nbytes, 1, NULL, true);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes, cudaStream_t stream)
{
    return copy_rows(to, nbytes, from, nbytes, nbytes, 1, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return copy_rows(to, to_pitch, from, from_pitch, width, height, stream, false);
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t nbytes, cudaStream_t stream)
{
    copy *it = malloc(sizeof *it);
    *it = (copy){at, NULL, nbytes, 1, nbytes, 0, value, rehearsal_is_null()};
    rehearsal_access access = {at, nbytes, 1};
    rehearsal_launch(stream, "memset", run_copy, free, it, &access, 1, 0);
    return result(failure() ? cudaErrorLaunchFailure : cudaSuccess);
}

cudaError_t cudaMemset(void *at, int value, size_t nbytes) { return cudaMemsetAsync(at, value, nbytes, NULL); }

/* --- streams ------------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    lock();
    *stream = new_stream(current_device, flags, priority);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    lock();
    destroy_stream(stream);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    lock();
    *priority = stream_of(handle)->priority;
    unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    lock();
    rehearsal_count(REHEARSAL_SYNCHRONIZATIONS);
    cudaStream_t stream = stream_of(handle);
    trace_host_wait(stream, stream->issued);
    cudaError_t error = run_until(stream, stream->issued);
    check_host_waits(stream, NULL);
    unlock();
    return result(error);
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    static __thread unsigned queries;
    lock();
    cudaStream_t stream = stream_of(handle);
    bool is_done = poll_until(stream, stream->issued, &queries);
    if (is_done)
        queries = 0, check_host_waits(stream, NULL);
    unlock();
    return failure() ? cudaErrorLaunchFailure : is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags)
{
    lock();
    rehearsal_count(REHEARSAL_WAITS);
    if (event->marker)
        wait_marker(stream_of(handle), event->marker);
    unlock();
    return result(failure() ? cudaErrorLaunchFailure : cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = current;
    current = *mode, *mode = before;
    return cudaSuccess;
}

typedef struct {
    cudaHostFn_t function;
    cudaStreamCallback_t callback;
    cudaStream_t stream;
    void *data;
} host_call;

static int run_host_call(void *argument)
{
    host_call *call = argument;
    if (call->function)
        call->function(call->data);
    else
        call->callback(call->stream, cudaSuccess, call->data);
    return REHEARSAL_DONE;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    host_call *call = malloc(sizeof *call);
    *call = (host_call){function, NULL, stream, data};
    rehearsal_launch(stream, "host function", run_host_call, free, call, NULL, 0, 0);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags)
{
    host_call *call = malloc(sizeof *call);
    *call = (host_call){NULL, callback, stream, data};
    rehearsal_launch(stream, "callback", run_host_call, free, call, NULL, 0, 0);
    return cudaSuccess;
}

/* --- events -------------------------------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    lock();
    drop_marker(event->marker);
    unlock();
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle)
{
    lock();
    drop_marker(event->marker);
    event->marker = NULL; /* What runs in record() must not see the old one. */
    rehearsal_count(REHEARSAL_RECORDS);
    event->marker = record(stream_of(handle));
    event->queries = 0;
    unlock();
    return result(failure() ? cudaErrorLaunchFailure : cudaSuccess);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    lock();
    bool is_done = !event->marker || poll_until(event->marker->stream, event->marker->number, &event->queries);
    if (is_done && event->marker)
        check_host_waits(NULL, event->marker);
    unlock();
    return failure() ? cudaErrorLaunchFailure : is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t error = cudaSuccess;
    lock();
    rehearsal_count(REHEARSAL_SYNCHRONIZATIONS);
    marker *moment = event->marker;
    if (moment) {
        moment->references++; /* Another thread may record the event meanwhile. */
        trace_host_wait(moment->stream, moment->number);
        error = run_until(moment->stream, moment->number);
        check_host_waits(NULL, moment);
        drop_marker(moment);
    }
    unlock();
    return result(error);
}

/* Not a time: the number of operations between the two, as microseconds. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t error = cudaSuccess;
    if (!start->marker || !end->marker)
        return result(cudaErrorInvalidResourceHandle);
    lock();
    if (!start->marker->is_done || !end->marker->is_done)
        error = cudaErrorNotReady;
    else
        *milliseconds = ((float)end->marker->tick - (float)start->marker->tick) / 1000;
    unlock();
    return result(error);
}

/* --- kernels: none of them can run --------------------------------------------------------------------------------- */

typedef struct {
    const void *host;
    const char *name;
} kernel;

static kernel *kernels;
static size_t kernel_count, kernel_room;

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid, uint3 *bid,
                            dim3 *block, dim3 *grid, int *warp)
{
    if (kernel_count == kernel_room)
        kernels = realloc(kernels, (kernel_room = kernel_room * 2 + 4096) * sizeof *kernels);
    kernels[kernel_count++] = (kernel){host, name};
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t nbytes, int constant,
                       int global)
{
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0, *(cudaStream_t *)stream = NULL;
    return cudaSuccess;
}

static int run_nothing(void *argument) { return REHEARSAL_DONE; }

static cudaError_t launch_kernel(const void *host, cudaStream_t stream)
{
    for (size_t i = 0; i < kernel_count; i++)
        if (kernels[i].host == host) {
            if (strstr(kernels[i].name, "spin_kernel")) { /* torch.cuda._sleep */
                rehearsal_launch(stream, "sleep", run_nothing, NULL, NULL, NULL, 0, 0);
                return cudaSuccess;
            }
            fprintf(stderr, "rehearsed: kernel %s was launched at %s: it cannot run\n", kernels[i].name, rehearsal_where());
            return result(cudaErrorNotSupported);
        }
    return not_stood_in("a kernel that was not registered");
}

cudaError_t __cudaGetKernel(cudaKernel_t *found, const void *host) { *found = (cudaKernel_t)host; return cudaSuccess; }

cudaError_t __cudaLaunchKernel(cudaKernel_t launched, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return launch_kernel((const void *)launched, stream);
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return launch_kernel(host, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments)
{
    return launch_kernel(host, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream)
{
    return launch_kernel(host, stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = capability();
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value)
{
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int block, size_t shared,
                                                                   unsigned flags)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *host, int block, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, host, block, shared, 0);
}

/* Of other functions, torch uses what it uses on an old driver. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    *function = driver_function(symbol);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

NOT_STOOD_IN(cudaDeviceGetDefaultMemPool, (cudaMemPool_t *pool, int device))
NOT_STOOD_IN(cudaFreeAsync, (void *at, cudaStream_t stream))
NOT_STOOD_IN(cudaMallocAsync, (void **at, size_t nbytes, cudaStream_t stream))
NOT_STOOD_IN(cudaMemPoolGetAttribute, (cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value))
NOT_STOOD_IN(cudaMemPoolSetAttribute, (cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value))
NOT_STOOD_IN(cudaMemPoolSetAccess, (cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count))
NOT_STOOD_IN(cudaMemPoolTrimTo, (cudaMemPool_t pool, size_t nbytes))
NOT_STOOD_IN(cudaMemcpyToSymbol, (const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind kind))
NOT_STOOD_IN(cudaGetSymbolAddress, (void **at, const void *symbol))
NOT_STOOD_IN(cudaIpcGetEventHandle, (cudaIpcEventHandle_t *handle, cudaEvent_t event))
NOT_STOOD_IN(cudaIpcOpenEventHandle, (cudaEvent_t *event, cudaIpcEventHandle_t handle))
NOT_STOOD_IN(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode))
NOT_STOOD_IN(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph))
NOT_STOOD_IN(cudaGraphDebugDotPrint, (cudaGraph_t graph, const char *path, unsigned flags))
NOT_STOOD_IN(cudaGraphDestroy, (cudaGraph_t graph))
NOT_STOOD_IN(cudaGraphExecDestroy, (cudaGraphExec_t graph))
NOT_STOOD_IN(cudaGraphGetNodes, (cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count))
NOT_STOOD_IN(cudaGraphInstantiateWithFlags, (cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags))
NOT_STOOD_IN(cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream))
NOT_STOOD_IN(cudaGraphNodeGetDependencies, (cudaGraphNode_t node, cudaGraphNode_t *on, cudaGraphEdgeData *edges, size_t *count))

/* NVIDIA's driver, CUDA runtime, cuBLAS and NCCL without a device, preloaded into a CUDA build of torch.
 *
 * torch sees H100s. Its allocator, streams, events, pinned memory, autograd threads, choice of kernels, compiler and
 * ProcessGroupNCCL are the real ones. Kernels compute nothing: what is read from the device is 0, or, with
 * FAKE_GPU_VALUES=1, what was last copied or set there (up to 1 MiB per copy).
 *
 * Counted and reported: launches, copies, collectives, cudaMalloc, cudaFree, and each wait of the host for the device.
 * A copy to pinned memory arrives when the host has waited for it, directly or through events; until then every byte
 * of the target is 0xff (nan, -1), so that reading too early shows. Pinned memory that the host has changed between a
 * copy from it and waiting for that copy is counted as overwritten.
 *
 * Not there: time, numerics, cuDNN, cuSOLVER, CUPTI (kernels in traces), graphs, expandable segments, other ranks.
 * Needs torch with CUDA 13. FAKE_GPU_COUNT: devices, 1 to 16.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

#define API __attribute__((visibility("default")))
/* A function that does nothing, whatever its arguments; named in assembly only, since the headers have its type. */
#define SUCCEEDS(name)                             \
    API int succeeding_##name(void) __asm__(#name); \
    int succeeding_##name(void) { return 0; }

/* ---- records, read from Python by ctypes ---- */

API const char fake_gpu_names[] = "launches gemms to_device to_host on_device memsets collectives mallocs frees "
                                  "host_allocs syncs overwritten";
enum { LAUNCH, GEMM, TO_DEVICE, TO_HOST, ON_DEVICE, MEMSET, COLLECTIVE, MALLOC, FREE, HOST_ALLOC, SYNC, OVERWRITTEN,
       KINDS };
API long fake_gpu_counts[KINDS];
API void (*fake_gpu_on_sync)(const char *call); /* is called at each wait */
static FILE *trace;
static int keeps_values;

static void count(int kind) { __sync_fetch_and_add(&fake_gpu_counts[kind], 1); }

static void waited(const char *call) {
    count(SYNC);
    if (fake_gpu_on_sync)
        fake_gpu_on_sync(call);
}

/* One line per launch from now on: stream and name; NULL ends it. */
API void fake_gpu_trace(const char *path) {
    if (trace)
        fclose(trace);
    trace = path ? fopen(path, "w") : NULL;
}

/* ---- devices ---- */

#define CONTEXT 629145600ull                 /* of its memory, what a CUDA context takes; assumed */
static const size_t total_memory = 85028896768ull; /* of an H100 80GB */
#define DEVICES 16
static __thread int current;

static int devices(void) {
    const char *count = getenv("FAKE_GPU_COUNT");
    return count ? atoi(count) : 1;
}

API cudaError_t cudaGetDeviceCount(int *n) { return *n = devices(), 0; }
API cudaError_t cudaGetDevice(int *device) { return *device = current, 0; }
API cudaError_t cudaSetDevice(int device) { return current = device, 0; }
API cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }

/* By CUDA's numbers of attributes, which the driver shares; others are 0. */
static int attribute(int number) {
    switch (number) {
    case 1: return 1024;       /* threads per block */
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647; /* blocks per grid */
    case 6: case 7: return 65535;
    case 8: return 49152;      /* shared memory per block */
    case 10: return 32;        /* threads per warp */
    case 12: return 65536;     /* registers per block */
    case 13: return 1980000;   /* clock in kHz */
    case 16: return 132;       /* multiprocessors */
    case 36: return 2619000;   /* memory's clock */
    case 37: return 5120;      /* memory's bus in bits */
    case 38: return 52428800;  /* L2 cache */
    case 39: return 2048;      /* threads per multiprocessor */
    case 75: return 9;         /* compute capability 9.0 */
    case 81: return 233472;    /* shared memory per multiprocessor */
    case 82: return 65536;     /* registers per multiprocessor */
    case 95: return 1;         /* cooperative launch */
    case 97: return 232448;    /* shared memory per block, opted in */
    case 106: return 32;       /* blocks per multiprocessor */
    default: return 0;
    }
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr number, int device) {
    return *value = attribute(number), 0;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    *p = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3",
        .totalGlobalMem = total_memory,
        .sharedMemPerBlock = attribute(8),
        .regsPerBlock = attribute(12),
        .warpSize = attribute(10),
        .memPitch = 2147483647,
        .maxThreadsPerBlock = attribute(1),
        .maxThreadsDim = {attribute(2), attribute(3), attribute(4)},
        .maxGridSize = {attribute(5), attribute(6), attribute(7)},
        .major = attribute(75),
        .minor = attribute(76),
        .textureAlignment = 512,
        .multiProcessorCount = attribute(16),
        .unifiedAddressing = 1,
        .l2CacheSize = attribute(38),
        .maxThreadsPerMultiProcessor = attribute(39),
        .sharedMemPerMultiprocessor = attribute(81),
        .regsPerMultiprocessor = attribute(82),
        .sharedMemPerBlockOptin = attribute(97),
        .concurrentKernels = 1,
        .asyncEngineCount = 3,
        .maxBlocksPerMultiProcessor = attribute(106),
        .cooperativeLaunch = attribute(95),
        .pciBusID = device,
    };
    return 0;
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    return snprintf(text, size, "0000:%02x:00.0", device), 0;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return 0;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 1, 0; }
SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaPeekAtLastError)

/* ---- memory: 1 TiB of addresses per device, and for pinned memory, handed out once and without pages ---- */

#define PINNED DEVICES
#define SHARE (1ull << 40)
#define PAGE (2ull << 20)
#define MAX_COPIED (1ull << 20)
static char *arena;
static struct {
    size_t used, next;
    size_t sizes[SHARE / PAGE]; /* of the allocation that begins at this page */
} owners[DEVICES + 1];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void start(void) {
    keeps_values = getenv("FAKE_GPU_VALUES") != NULL;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    arena = mmap(0, SHARE * (DEVICES + 1), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (arena == MAP_FAILED) {
        perror("fake_gpu: no addresses");
        exit(1);
    }
}

/* The device, PINNED, or -1 for other memory of the host. */
static int owner_of(const void *p) {
    size_t offset = (size_t)((const char *)p - arena);
    return offset < SHARE * (DEVICES + 1) ? (int)(offset / SHARE) : -1;
}
static int on_device(const void *p) {
    int owner = owner_of(p);
    return owner >= 0 && owner < PINNED;
}

static cudaError_t allocate(void **p, size_t size, int owner) {
    size_t room = owner == PINNED ? SHARE : total_memory - CONTEXT;
    size_t taken = (size + PAGE - 1) / PAGE * PAGE;
    cudaError_t error = cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    if (owners[owner].used + size <= room && owners[owner].next + taken <= SHARE) {
        *p = arena + owner * SHARE + owners[owner].next;
        owners[owner].sizes[owners[owner].next / PAGE] = size;
        owners[owner].used += size;
        owners[owner].next += taken;
        error = cudaSuccess;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void release(void *p) {
    int owner = owner_of(p);
    if (!p || owner < 0)
        return;
    pthread_mutex_lock(&lock);
    size_t *size = &owners[owner].sizes[((char *)p - arena) % SHARE / PAGE];
    madvise(p, *size, MADV_DONTNEED);
    owners[owner].used -= *size;
    *size = 0;
    pthread_mutex_unlock(&lock);
}

API cudaError_t cudaMalloc(void **p, size_t size) {
    count(MALLOC);
    return allocate(p, size, current);
}
API cudaError_t cudaFree(void *p) {
    if (p) {
        count(FREE);
        waited("cudaFree");
        release(p);
    }
    return 0;
}
API cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t stream) { return cudaMalloc(p, size); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return count(FREE), release(p), 0; }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = total_memory - CONTEXT - owners[current].used;
    *total = total_memory;
    return 0;
}
API cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) {
    count(HOST_ALLOC);
    return allocate(p, size, PINNED);
}
API cudaError_t cudaFreeHost(void *p) { return release(p), 0; }
SUCCEEDS(cudaHostRegister)
SUCCEEDS(cudaHostUnregister)
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    int owner = owner_of(p);
    enum cudaMemoryType type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    if (owner < 0)
        type = cudaMemoryTypeUnregistered;
    int device = on_device(p) ? owner : 0;
    *a = (struct cudaPointerAttributes){type, device, (void *)p, (void *)p};
    return 0;
}

/* ---- streams and events: what happens before what, by vector clocks ---- */

#define STREAMS 512
typedef struct {
    long of[STREAMS]; /* how many operations of each stream are known to be over */
} Clock;
static Clock streams[STREAMS], host;
static int last_stream = 16; /* smaller numbers are CUDA's own: 0 is the default stream */

typedef struct Copy {
    struct Copy *next;
    void *target, *values;
    const void *source; /* NULL unless it is pinned memory */
    size_t size;
    int stream;
    long time;
} Copy;
static Copy *under_way; /* to the host, and from pinned memory */

static int number_of(const void *stream) { return (int)((uintptr_t)stream % STREAMS); }

static void join(Clock *clock, const Clock *other) {
    for (int i = 0; i <= last_stream; i++)
        if (other->of[i] > clock->of[i])
            clock->of[i] = other->of[i];
}

/* The host has waited for `clock`: what was copied before arrives. */
static void arrive(const Clock *clock) {
    pthread_mutex_lock(&lock);
    join(&host, clock);
    for (Copy **place = &under_way; *place;) {
        Copy *copy = *place;
        if (host.of[copy->stream] < copy->time) {
            place = &copy->next;
            continue;
        }
        if (copy->source) {
            if (memcmp(copy->source, copy->values, copy->size))
                count(OVERWRITTEN);
        } else if (copy->values)
            memcpy(copy->target, copy->values, copy->size);
        else
            memset(copy->target, 0, copy->size);
        *place = copy->next;
        free(copy->values);
        free(copy);
    }
    pthread_mutex_unlock(&lock);
}

static void arrive_all(void) {
    for (int i = 0; i <= last_stream; i++)
        arrive(&streams[i]);
}

static long tick(const void *stream) { return ++streams[number_of(stream)].of[number_of(stream)]; }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    int number = __sync_add_and_fetch(&last_stream, 1);
    if (number >= STREAMS)
        return cudaErrorUnknown;
    return *stream = (cudaStream_t)(uintptr_t)number, 0;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
SUCCEEDS(cudaStreamDestroy)
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, 0; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) { return arrive(&streams[number_of(stream)]), 0; }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    waited("cudaStreamSynchronize");
    return arrive(&streams[number_of(stream)]), 0;
}
API cudaError_t cudaDeviceSynchronize(void) { return waited("cudaDeviceSynchronize"), arrive_all(), 0; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return join(&streams[number_of(stream)], (Clock *)event), 0;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return *event = calloc(1, sizeof(Clock)), 0;
}
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), 0; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    tick(stream);
    *(Clock *)event = streams[number_of(stream)];
    return 0;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) { return arrive((Clock *)event), 0; }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    waited("cudaEventSynchronize");
    return arrive((Clock *)event), 0;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { return *ms = 1, 0; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument) {
    return call(argument), 0;
}

/* Nothing is ever captured into a graph. */
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, 0;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *size) {
    return *status = cudaStreamCaptureStatusNone, 0;
}
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)

/* ---- copies ---- */

static void put_under_way(Copy values) {
    Copy *copy = malloc(sizeof *copy);
    *copy = values;
    pthread_mutex_lock(&lock);
    copy->next = under_way;
    under_way = copy;
    pthread_mutex_unlock(&lock);
}

static void copy_to_host(void *target, const void *source, size_t size, cudaStream_t stream) {
    Copy copy = {.target = target, .size = size, .stream = number_of(stream), .time = tick(stream)};
    if (keeps_values && size <= MAX_COPIED)
        copy.values = memcpy(malloc(size), source, size);
    memset(target, 0xff, size);
    put_under_way(copy);
}

static void copy_from_pinned(const void *source, size_t size, cudaStream_t stream) {
    Copy copy = {.source = source, .size = size, .stream = number_of(stream), .time = tick(stream)};
    if (size > MAX_COPIED)
        copy.size = MAX_COPIED;
    copy.values = memcpy(malloc(copy.size), source, copy.size);
    put_under_way(copy);
}

API cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
    int from_device = on_device(source), to_device = on_device(target);
    if (from_device && !to_device) {
        count(TO_HOST);
        copy_to_host(target, source, size, stream);
    } else {
        count(from_device ? ON_DEVICE : TO_DEVICE);
        if (owner_of(source) == PINNED)
            copy_from_pinned(source, size, stream);
        else
            tick(stream);
        if (keeps_values && size <= MAX_COPIED)
            memmove(target, source, size);
    }
    /* From pageable memory it may wait, to pageable memory it does (CUDA's "API synchronization behavior"). */
    if (from_device && owner_of(target) < 0) {
        waited("cudaMemcpyAsync to pageable memory");
        arrive(&streams[number_of(stream)]);
    } else if (to_device && owner_of(source) < 0) {
        waited("cudaMemcpyAsync from pageable memory");
    }
    return 0;
}
API cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    cudaMemcpyAsync(target, source, size, kind, 0);
    waited("cudaMemcpy");
    return arrive_all(), 0;
}
API cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size,
                                    cudaStream_t stream) {
    return cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    count(MEMSET);
    tick(stream);
    if (keeps_values && size <= MAX_COPIED)
        memset(target, value, size);
    return 0;
}
API cudaError_t cudaMemset(void *target, int value, size_t size) { return cudaMemsetAsync(target, value, size, 0); }
SUCCEEDS(cudaMemcpyToSymbol)
API cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return *address = (void *)symbol, 0; }

/* ---- kernels ---- */

#define KERNELS (1 << 18)
static struct {
    const void *function;
    const char *name; /* mangled */
} kernels[KERNELS];
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed; /* by <<<...>>> */
static char handle[256]; /* what is only passed around */

static size_t place_of(const void *function) {
    size_t place = ((uintptr_t)function >> 4) % KERNELS;
    while (kernels[place].function && kernels[place].function != function)
        place = (place + 1) % KERNELS;
    return place;
}

static int launched(int kind, const char *name, const void *stream) {
    count(kind);
    tick(stream);
    if (trace)
        fprintf(trace, "%d %s\n", number_of(stream), name);
    return 0;
}

API void **__cudaRegisterFatBinary(void *binary) { return (void **)handle; }
SUCCEEDS(__cudaRegisterFatBinaryEnd)
SUCCEEDS(__cudaUnregisterFatBinary)
SUCCEEDS(__cudaRegisterVar)
API char __cudaInitModule(void **module) { return 1; }
API void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, ...) {
    size_t place = place_of(function);
    kernels[place].function = function;
    kernels[place].name = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return 0;
}
API cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, 0; }
API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 cudaStream_t stream) {
    const char *name = kernels[place_of(function)].name;
    return launched(LAUNCH, name ? name : "unknown", stream);
}
API cudaError_t __cudaLaunchKernel(void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, config->stream);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
    a->maxDynamicSharedSizeBytes = attribute(97);
    return 0;
}
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaKernelSetAttributeForDevice)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                       size_t shared, unsigned flags) {
    return *blocks = 2, 0;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    *entry = NULL;
    if (result)
        *result = cudaDriverEntryPointSymbolNotFound;
    return 0;
}

/* ---- cuBLAS ---- */

typedef struct {
    void *stream;
} Blas;
API int cublasCreate_v2(Blas **blas) { return *blas = calloc(1, sizeof(Blas)), 0; }
API int cublasSetStream_v2(Blas *blas, void *stream) { return blas->stream = stream, 0; }
API int cublasDestroy_v2(Blas *blas) { return free(blas), 0; }
API int cublasGetMathMode(Blas *blas, int *mode) { return *mode = 0, 0; }
API int cublasGetPointerMode_v2(Blas *blas, int *mode) { return *mode = 0, 0; }
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)

#define MULTIPLIES(name) \
    API int name(Blas *blas) { return launched(GEMM, #name, blas->stream); } /* later arguments are not looked at */
MULTIPLIES(cublasGemmEx)
MULTIPLIES(cublasGemmStridedBatchedEx)
MULTIPLIES(cublasSgemm_v2)
MULTIPLIES(cublasSgemmEx)
MULTIPLIES(cublasSgemmStridedBatched)
MULTIPLIES(cublasDgemm_v2)
MULTIPLIES(cublasDgemmStridedBatched)
MULTIPLIES(cublasSgemv_v2)
MULTIPLIES(cublasDgemv_v2)
MULTIPLIES(cublasSdot_v2)
MULTIPLIES(cublasDdot_v2)
MULTIPLIES(cublasDotEx)

API size_t cublasLtGetVersion(void) { return 130100; }
#define MAKES(name) \
    API int name(void **made) { return *made = calloc(1, 256), 0; }
#define FREES(name) \
    API int name(void *made) { return free(made), 0; }
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatrixLayoutCreate)
MAKES(cublasLtMatmulPreferenceCreate)
FREES(cublasLtMatmulDescDestroy)
FREES(cublasLtMatrixLayoutDestroy)
FREES(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
API int cublasLtMatmulAlgoGetHeuristic(void *blas, void *what, void *a, void *b, void *c, void *d, void *preference,
                                       int wanted, void *results, int *found) {
    memset(results, 0, 64); /* an algorithm without a workspace */
    return *found = 1, 0;
}
API int cublasLtMatmul(void *blas, void *what, void *alpha, void *a, void *of_a, void *b, void *of_b, void *beta,
                       void *c, void *of_c, void *d, void *of_d, void *algorithm, void *workspace, size_t size,
                       void *stream) {
    return launched(GEMM, "cublasLtMatmul", stream);
}

/* ---- NCCL: this rank's part of a collective; the other ranks are taken to hold the same ---- */

typedef struct {
    int ranks, rank; /* ranks is 0 where it is not known */
} Comm;
typedef struct {
    char bytes[128];
} Id;
API int ncclGetVersion(int *version) { return *version = 23007, 0; }
API int ncclGetUniqueId(Id *id) { return memset(id, 7, sizeof *id), 0; }
API int ncclCommInitRank(Comm **comm, int ranks, Id id, int rank) {
    *comm = malloc(sizeof(Comm));
    **comm = (Comm){ranks, rank};
    return 0;
}
API int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, void *config) {
    return ncclCommInitRank(comm, ranks, id, rank);
}
API int ncclCommInitRankScalable(Comm **comm, int ranks, int rank, int ids, Id *id, void *config) {
    return ncclCommInitRank(comm, ranks, *id, rank);
}
/* Only the other ranks know whether they have this color. */
API int ncclCommSplit(Comm *comm, int color, int key, Comm **part, void *config) {
    return ncclCommInitRank(part, 0, (Id){{0}}, key);
}
API int ncclCommCount(Comm *comm, int *ranks) { return *ranks = comm->ranks, 0; }
API int ncclCommUserRank(Comm *comm, int *rank) { return *rank = comm->rank, 0; }
API int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = 0, 0; }
API const char *ncclGetErrorString(int error) { return "no error"; }
API const char *ncclGetLastError(Comm *comm) { return ""; }
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclCommRegister)
SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclCommMemStats)

/* Bytes of `count` elements of an ncclDataType_t. */
static size_t bytes_of(size_t count, int type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}
static int collective(const char *name, const void *from, void *to, size_t size, void *stream) {
    if (keeps_values && from != to && size <= MAX_COPIED)
        memmove(to, from, size);
    return launched(COLLECTIVE, name, stream);
}
API int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream) {
    return collective("ncclAllReduce", from, to, bytes_of(n, type), stream);
}
API int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, Comm *comm, void *stream) {
    return collective("ncclReduce", from, to, bytes_of(n, type), stream);
}
API int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Comm *comm, void *stream) {
    return collective("ncclBroadcast", from, to, bytes_of(n, type), stream);
}
API int ncclBcast(void *buffer, size_t n, int type, int root, Comm *comm, void *stream) {
    return collective("ncclBcast", buffer, buffer, 0, stream);
}
API int ncclAllGather(const void *from, void *to, size_t n, int type, Comm *comm, void *stream) {
    size_t size = bytes_of(n, type);
    for (int rank = 0; rank < comm->ranks && keeps_values && size <= MAX_COPIED; rank++)
        memmove((char *)to + rank * size, from, size);
    return launched(COLLECTIVE, "ncclAllGather", stream);
}
API int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream) {
    size_t size = bytes_of(n, type);
    size_t begin = comm->ranks ? comm->rank * size : 0;
    return collective("ncclReduceScatter", (const char *)from + begin, to, size, stream);
}
API int ncclAlltoAll(const void *from, void *to, size_t n, int type, Comm *comm, void *stream) {
    return collective("ncclAlltoAll", from, to, 0, stream);
}
API int ncclSend(const void *from, size_t n, int type, int peer, Comm *comm, void *stream) {
    return launched(COLLECTIVE, "ncclSend", stream);
}
API int ncclRecv(void *to, size_t n, int type, int peer, Comm *comm, void *stream) {
    return launched(COLLECTIVE, "ncclRecv", stream);
}

/* ---- the driver: this file is libcuda.so.1 too ---- */

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuDevicePrimaryCtxRetain)
API int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
API int cuDeviceGetCount(int *n) { return *n = devices(), 0; }
API int cuDeviceGet(int *device, int number) { return *device = number, 0; }
API int cuDeviceGetAttribute(int *value, int number, int device) { return *value = attribute(number), 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
API int cuCtxGetCurrent(void **context) { return *context = handle, 0; }
API int cuCtxGetDevice(int *device) { return *device = current, 0; }
API int cuGetErrorString(int error, const char **text) { return *text = "no error", 0; }
API int cuGetErrorName(int error, const char **text) { return *text = "CUDA_SUCCESS", 0; }
API int cuModuleLoadData(void **module, const void *image) { return *module = handle, 0; }
API int cuModuleLoad(void **module, const char *path) { return *module = handle, 0; }
API int cuModuleLoadDataEx(void **module, const void *image) { return *module = handle, 0; }
API int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = strdup(name), 0; }
API int cuFuncGetAttribute(int *value, int number, void *function) { return *value = number == 4 ? 32 : 1024, 0; }
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuPointerGetAttribute)
SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuOccupancyMaxActiveClusters)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) {
    return *blocks = 2, 0;
}
API int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                       unsigned block_z, unsigned shared, void *stream, void **arguments, void **more) {
    return launched(LAUNCH, function, stream);
}
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
} Launch;
API int cuLaunchKernelEx(const Launch *launch, void *function, void **arguments, void **more) {
    return launched(LAUNCH, function, launch->stream);
}

/* What the generated libraries need bodies for: memory that is the host's, streams that have always finished, one device.

   stubs.py compiles this file into libcudart and makes every other symbol that torch imports a function that returns 0.
   Layouts are those of CUDA 13 on 64-bit machines. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef API
#define API __attribute__((visibility("default")))
#endif

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, REGISTERED = 712, NOT_REGISTERED = 713 };
enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2 };

/* ---- errors: a failed call leaves one until somebody takes it ---- */

static __thread int last_error;

static int failed(int error) { return last_error = error; }

API int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}
API int cudaPeekAtLastError(void) { return last_error; }

API const char *cudaGetErrorString(int error) {
    switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_DEVICE: return "invalid device ordinal";
    case REGISTERED: return "part or all of the requested memory range is already mapped";
    case NOT_REGISTERED: return "pointer does not correspond to a registered memory region";
    default: return "unknown error";
    }
}
API const char *cudaGetErrorName(int error) {
    switch (error) {
    case SUCCESS: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case REGISTERED: return "cudaErrorHostMemoryAlreadyRegistered";
    case NOT_REGISTERED: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaErrorUnknown";
    }
}

/* ---- memory: every range that CUDA knows ---- */

#define DEVICE_NBYTES ((size_t)1 << 30)

struct range {
    char *start;
    size_t nbytes;
    int type;
    struct range *next;
};

static struct range *ranges;
static size_t device_used;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static struct range **containing(const void *address, size_t nbytes) {
    const char *at = address;
    struct range **found = &ranges;
    while (*found && !(at < (*found)->start + (*found)->nbytes && (*found)->start < at + nbytes)) found = &(*found)->next;
    return found;
}

static int know(void *start, size_t nbytes, int type) {
    pthread_mutex_lock(&ranges_lock);
    int known = *containing(start, nbytes) != NULL;
    if (!known) {
        struct range *added = malloc(sizeof *added);
        *added = (struct range){start, nbytes, type, ranges};
        ranges = added;
    }
    pthread_mutex_unlock(&ranges_lock);
    return known ? failed(REGISTERED) : SUCCESS;
}

/* The bytes of the range that starts there, which is forgotten; 0 where none of this type does. */
static size_t forget(void *start, int type) {
    size_t nbytes = 0;
    pthread_mutex_lock(&ranges_lock);
    struct range **found = containing(start, 1), *old = *found;
    if (old && old->start == start && old->type == type) {
        nbytes = old->nbytes;
        *found = old->next;
        free(old);
        if (type == DEVICE) device_used -= nbytes;
    }
    pthread_mutex_unlock(&ranges_lock);
    return nbytes;
}

API int cudaMalloc(void **out, size_t nbytes) {
    pthread_mutex_lock(&ranges_lock);
    int fits = nbytes <= DEVICE_NBYTES - device_used;
    if (fits) device_used += nbytes;
    pthread_mutex_unlock(&ranges_lock);
    *out = NULL;
    if (!fits) return failed(OUT_OF_MEMORY);
    if (posix_memalign(out, 1 << 16, nbytes ? nbytes : 1)) return failed(OUT_OF_MEMORY);
    memset(*out, 0, nbytes);
    return know(*out, nbytes, DEVICE);
}
API int cudaMallocAsync(void **out, size_t nbytes, void *stream) { return cudaMalloc(out, nbytes); }
API int cudaFree(void *start) {
    if (!start) return SUCCESS;
    if (!forget(start, DEVICE)) return failed(INVALID_VALUE);
    free(start);
    return SUCCESS;
}
API int cudaFreeAsync(void *start, void *stream) { return cudaFree(start); }
API int cudaMemGetInfo(size_t *left, size_t *total) {
    *left = DEVICE_NBYTES - device_used;
    *total = DEVICE_NBYTES;
    return SUCCESS;
}
API int cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
    if (posix_memalign(out, 4096, nbytes ? nbytes : 1)) return failed(OUT_OF_MEMORY);
    return know(*out, nbytes, HOST);
}
API int cudaMallocHost(void **out, size_t nbytes) { return cudaHostAlloc(out, nbytes, 0); }
API int cudaFreeHost(void *start) {
    if (!start) return SUCCESS;
    if (!forget(start, HOST)) return failed(INVALID_VALUE);
    free(start);
    return SUCCESS;
}
API int cudaHostRegister(void *start, size_t nbytes, unsigned flags) {
    return start && nbytes ? know(start, nbytes, HOST) : failed(INVALID_VALUE);
}
API int cudaHostUnregister(void *start) { return forget(start, HOST) ? SUCCESS : failed(NOT_REGISTERED); }

struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};

API int cudaPointerGetAttributes(struct attributes *out, const void *address) {
    pthread_mutex_lock(&ranges_lock);
    struct range *found = *containing(address, 1);
    memset(out, 0, sizeof *out);
    out->type = found ? found->type : UNREGISTERED;
    out->device = found && found->type == DEVICE ? 0 : -1;
    out->device_pointer = found ? (void *)address : NULL;
    out->host_pointer = out->type == DEVICE ? NULL : (void *)address;
    pthread_mutex_unlock(&ranges_lock);
    return SUCCESS;
}

/* ---- copies: a number that the host reads is 0, because no kernel has written it ---- */

enum { DEVICE_TO_HOST = 2 };

API int cudaMemcpy(void *to, const void *from, size_t nbytes, int kind) {
    if (kind == DEVICE_TO_HOST && nbytes <= 8) memset(to, 0, nbytes);
    else memmove(to, from, nbytes);
    return SUCCESS;
}
API int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    return cudaMemcpy(to, from, nbytes, kind);
}
API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t nbytes, void *stream) {
    return cudaMemcpy(to, from, nbytes, 0);
}
API int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, int kind,
                          void *stream) {
    for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
    return SUCCESS;
}
API int cudaMemset(void *to, int value, size_t nbytes) {
    memset(to, value, nbytes);
    return SUCCESS;
}
API int cudaMemsetAsync(void *to, int value, size_t nbytes, void *stream) { return cudaMemset(to, value, nbytes); }

/* ---- the device ---- */

static __thread int current_device;

API int cudaGetDeviceCount(int *out) { return *out = 1, SUCCESS; }
API int cudaGetDevice(int *out) { return *out = current_device, SUCCESS; }
API int cudaSetDevice(int device) {
    if (device != 0) return failed(INVALID_DEVICE);
    return SUCCESS;
}
API int cudaDriverGetVersion(int *out) { return *out = 13000, SUCCESS; }
API int cudaRuntimeGetVersion(int *out) { return *out = 13000, SUCCESS; }
API int cudaDeviceCanAccessPeer(int *out, int device, int peer) { return *out = 0, SUCCESS; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
API int cudaDeviceGetPCIBusId(char *out, int nbytes, int device) {
    snprintf(out, nbytes, "0000:01:00.0");
    return SUCCESS;
}

struct properties {
    char name[256];
    char uuid[16], luid[8];
    unsigned luid_device_node_mask;
    size_t total_global_mem, shared_mem_per_block;
    int regs_per_block, warp_size;
    size_t mem_pitch;
    int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
    size_t total_const_mem;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multi_processor_count, integrated, can_map_host_memory;
    int textures[39]; /* maxTexture1D to maxSurfaceCubemapLayered */
    size_t surface_alignment;
    int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver, async_engine_count;
    int unified_addressing, memory_bus_width, l2_cache_size, persisting_l2_cache_max_size, max_threads_per_multi_processor;
    int stream_priorities_supported, global_l1_cache_supported, local_l1_cache_supported;
    size_t shared_mem_per_multiprocessor;
    int regs_per_multiprocessor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id, host_native_atomic_supported;
    int pageable_memory_access, concurrent_managed_access, compute_preemption_supported, can_use_host_pointer;
    int cooperative_launch;
    size_t shared_mem_per_block_optin;
    int pageable_memory_access_uses_host_page_tables, direct_managed_mem_access_from_host, max_blocks_per_multi_processor;
    int access_policy_max_window_size;
    size_t reserved_shared_mem_per_block;
    int host_register_supported;
    int others[75]; /* sparseCudaArraySupported to the end */
};

API int cudaGetDeviceProperties(struct properties *out, int device) {
    if (device != 0) return failed(INVALID_DEVICE);
    memset(out, 0, sizeof *out);
    strcpy(out->name, "Stub of a CUDA device");
    memcpy(out->uuid, "zhooks cuda stub", 16);
    out->total_global_mem = DEVICE_NBYTES;
    out->shared_mem_per_block = 48 << 10;
    out->regs_per_block = out->regs_per_multiprocessor = 65536;
    out->warp_size = 32;
    out->mem_pitch = 2147483647;
    out->max_threads_per_block = 1024;
    out->max_threads_dim[0] = out->max_threads_dim[1] = 1024, out->max_threads_dim[2] = 64;
    out->max_grid_size[0] = 2147483647, out->max_grid_size[1] = out->max_grid_size[2] = 65535;
    out->total_const_mem = 64 << 10;
    out->major = 9;
    out->texture_alignment = out->surface_alignment = 512;
    out->multi_processor_count = 132;
    out->can_map_host_memory = out->concurrent_kernels = out->unified_addressing = out->host_register_supported = 1;
    out->pci_bus_id = 1;
    out->async_engine_count = 3;
    out->memory_bus_width = 5120;
    out->l2_cache_size = 50 << 20;
    out->max_threads_per_multi_processor = 2048;
    out->stream_priorities_supported = out->cooperative_launch = 1;
    out->shared_mem_per_multiprocessor = 228 << 10;
    out->shared_mem_per_block_optin = 227 << 10;
    out->max_blocks_per_multi_processor = 32;
    return SUCCESS;
}

API int cudaDeviceGetAttribute(int *out, int attribute, int device) {
    switch (attribute) {
    case 1: *out = 1024; break;          /* threads of a block */
    case 8: *out = 48 << 10; break;      /* shared memory of a block */
    case 10: *out = 32; break;           /* a warp */
    case 16: *out = 132; break;          /* multiprocessors */
    case 39: *out = 2048; break;         /* threads of a multiprocessor */
    case 75: *out = 9; break;            /* compute capability 9.0 */
    case 97: *out = 227 << 10; break;    /* shared memory of a block that asks for it */
    default: *out = 0;
    }
    return SUCCESS;
}

/* The driver's functions, which torch asks for by name. */
static int nothing(void) { return SUCCESS; }

API int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, uint64_t flags, int *status) {
    void *found = dlsym(RTLD_DEFAULT, name);
    *out = found ? found : (void *)nothing;
    if (status) *status = 0;
    return SUCCESS;
}
API int cudaGetDriverEntryPoint(const char *name, void **out, uint64_t flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, out, 0, flags, status);
}

/* ---- streams and events: whatever was queued has run ---- */

static int handle(void **out) { return *out = calloc(1, 64), SUCCESS; }
static int released(void *which) { return free(which), SUCCESS; }

API int cudaStreamCreate(void **out) { return handle(out); }
API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return handle(out); }
API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) { return handle(out); }
API int cudaStreamDestroy(void *stream) { return released(stream); }
API int cudaStreamGetPriority(void *stream, int *out) { return *out = 0, SUCCESS; }
API int cudaStreamIsCapturing(void *stream, int *out) { return *out = 0, SUCCESS; }
API int cudaStreamGetCaptureInfo(void *stream, int *out, uint64_t *id) {
    *out = 0;
    if (id) *id = 0;
    return SUCCESS;
}
API int cudaEventCreate(void **out) { return handle(out); }
API int cudaEventCreateWithFlags(void **out, unsigned flags) { return handle(out); }
API int cudaEventDestroy(void *event) { return released(event); }
API int cudaEventElapsedTime(float *out, void *begin, void *end) { return *out = 1.0f, SUCCESS; }
API int cudaLaunchHostFunc(void *stream, void (*call)(void *), void *with) { return call(with), SUCCESS; }
API int cudaStreamAddCallback(void *stream, void (*call)(void *, int, void *), void *with, unsigned flags) {
    return call(stream, SUCCESS, with), SUCCESS;
}

/* ---- kernels: registered, and never run ---- */

static char symbols[1 << 16];

API void **__cudaRegisterFatBinary(void *binary) { return (void **)symbols; }
API int cudaGetSymbolAddress(void **out, const void *symbol) { return *out = symbols, SUCCESS; }
API int cudaLibraryGetKernel(void **out, void *library, const char *name) { return *out = symbols, SUCCESS; }
API int cudaLibraryLoadData(void **out) { return *out = symbols, SUCCESS; }
API int __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void **stream) {
    return *shared = 0, *stream = NULL, SUCCESS;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel, int threads, size_t shared,
                                                               unsigned flags) {
    return *out = 1, SUCCESS;
}

struct kernel_attributes {
    size_t shared, constant, local;
    int max_threads, registers, ptx_version, binary_version, others[25];
};

API int cudaFuncGetAttributes(struct kernel_attributes *out, const void *kernel) {
    memset(out, 0, sizeof *out);
    out->max_threads = 1024;
    out->registers = 32;
    out->ptx_version = out->binary_version = 90;
    return SUCCESS;
}
